const data = JSON.parse(by("data").textContent);
const signed = (value, digits) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);

// the pointer, or the arrow keys, read one of `count` values after another; null is none of them
function reader(element, count, atPointer, show) {
  let current = null;
  const read = (index) => {
    current = index;
    show(index);
  };
  element.addEventListener("pointermove", (event) => read(atPointer(event)));
  for (const name of ["pointerleave", "blur"]) element.addEventListener(name, () => read(null));
  element.addEventListener("keydown", (event) => {
    const last = count - 1;
    const next = { ArrowLeft: Math.max((current ?? count) - 1, 0), ArrowRight: Math.min((current ?? -1) + 1, last), Home: 0, End: last, Escape: null }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    read(next);
  });
}
for (const chart of all(".chart")) {
  const hits = all(".hit", chart), text = chart.parentElement.querySelector(".read");
  const atPointer = (event) => (event.target.closest(".hit") ? hits.indexOf(event.target.closest(".hit")) : null);
  reader(chart, hits.length, atPointer, (index) => {
    hits.forEach((hit, other) => hit.classList.toggle("on", other === index));
    text.textContent = index === null ? "" : hits[index].dataset.text;
  });
}

// curves: one cursor over all strips
if (by("strips")) {
  const { first, last } = data, strips = all(".strip"), ends = strips.map((strip) => [...strip.querySelector(".val").children]);
  const clamp = (index) => Math.min(last - first, Math.max(0, index));
  const atPointer = (event) => {
    const box = strips[0].querySelector(".area").getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    return share < -0.02 || share > 1.02 ? null : clamp(Math.round(share * (last - first)));
  };
  reader(by("strips"), last - first + 1, atPointer, (index) => {
    const step = index === null ? "" : `${data.unit} ${first + index}`;
    const texts = strips.map((strip, row) => {
      const cursor = strip.querySelector(".cursor"), cell = strip.querySelector(".val");
      cursor.hidden = index === null;
      cursor.style.left = `${(100 * index) / Math.max(last - first, 1)}%`;
      const value = number(data.curves[strip.dataset.metric][first + index]);
      cell.replaceChildren(...(index === null ? ends[row] : [make("b", "", value), make("span", "", step)]));
      return `${strip.querySelector(".name b").firstChild.data.trim()} ${value}`;
    });
    by("status").textContent = step && `${step}: ${texts.join(", ")}`;
  });
}

// tokens
if (by("list")) {
  const list = by("list"), select = by("objective");
  const tell = (top, index) => {
    const response = data.responses[top.response], share = top.shares[index];
    const methods = Object.keys(top.did).filter((name) => top.did[name].includes(index));
    const facts = [
      ...(methods.length ? [["methods", methods.join(", ")]] : []),
      ["share of the gradient", share ? `${signed(100 * share, 3)} %` : "none"],
      ["ratio", number(top.ratio[index])],
      ...(top.weight ? [["weight", number(top.weight[index])]] : []),
      ["p, trainer", number(response.p[index])],
      ...(response.q ? [["p, sampler", number(response.q[index])]] : []),
      ["advantage", signed(response.advantage[index] ?? 0, 2)],
      ["token", `${index + 1} of ${response.tokens.length}`],
    ];
    const list = make("dl");
    list.append(...facts.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
    const none = response.advantage[index] === 0 ? "No gradient: its advantage is 0." : "No gradient under this objective.";
    const text = share > 0 ? "Blue: the step makes it likelier." : share < 0 ? "Orange: the step makes it less likely." : none;
    by("card").replaceChildren(make("div", "big", response.tokens[index]), list, make("p", "", text));
  };
  const mark = (token, focus = true) => {
    if (!token) return;
    const current = list.querySelector("[aria-current]");
    if (current) Object.assign(current, { ariaCurrent: null, tabIndex: -1 });
    Object.assign(token, { ariaCurrent: "true", tabIndex: 0 });
    tell(data.objectives[select.value][token.dataset.top], Number(token.dataset.index));
    if (focus) token.focus();
  };
  const draw = () => {
    const top = data.objectives[select.value];
    const most = Math.max(...top.flatMap((row) => row.shares.map(Math.abs)), 1e-30);
    list.replaceChildren(...top.map(({ response: key, share: total, shares }, row) => {
      const response = data.responses[key], article = make("article", "resp"), head = make("p", "h"), body = make("p", "b");
      const facts = [["share of the gradient", `${(100 * total).toFixed(2)} %`], ["step", response.step], ["response", response.id], ["reward", number(response.reward)]];
      for (const [name, value] of facts) head.appendChild(make("span", "", `${name} `)).append(make("b", "", String(value)));
      body.append(make("span", "pr", response.prompt));
      response.tokens.forEach((text, index) => {
        const value = shares[index], size = Math.abs(value) / most;
        const level = value === 0 ? 0 : size > 0.5 ? 4 : size > 0.2 ? 3 : size > 0.06 ? 2 : size > 0.01 ? 1 : 0;
        const token = make("span", `t${level ? ` d${value > 0 ? 4 + level : 4 - level}` : ""}${value === 0 ? " off" : ""}`, text);
        Object.assign(token.dataset, { top: row, index });
        body.append(token);
      });
      article.append(head, body);
      return article;
    }));
    mark(list.querySelector(".d8, .d0") ?? list.querySelector(".t"), false);
  };
  list.addEventListener("click", (event) => mark(event.target.closest(".t")));
  list.addEventListener("keydown", (event) => {
    const every = all(".t", list), index = every.indexOf(event.target.closest(".t"));
    const row = event.target.closest(".resp"), first = (other) => other?.querySelector(".t");
    const next = { ArrowLeft: every[index - 1], ArrowRight: every[index + 1], ArrowUp: first(row?.previousElementSibling), ArrowDown: first(row?.nextElementSibling), Home: every[0], End: every.at(-1) }[event.key];
    if (index < 0 || !next) return;
    event.preventDefault();
    mark(next);
  });
  select.addEventListener("change", draw);
  for (const button of all("[data-open]"))
    button.addEventListener("click", () => {
      select.value = button.dataset.open;
      draw();
      by("tokens").scrollIntoView();
      select.focus({ preventScroll: true });
    });
  draw();
}
