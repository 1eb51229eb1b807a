"use strict";
(() => {
  const root = document.documentElement, by = (id) => document.getElementById(id), data = JSON.parse(by("data").textContent);
  const make = (tag, name, text) => {
    const one = document.createElement(tag);
    if (name) one.className = name;
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const signed = (value, digits) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
  const short = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(3))));

  // theme
  const button = by("theme");
  const paint = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${button.textContent.toLowerCase()} theme`);
  };
  paint(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  button.addEventListener("click", () => paint(root.dataset.theme === "dark" ? "light" : "dark"));

  // curves: one cursor over all strips, by pointer or arrow keys
  const curves = by("strips");
  if (curves) {
    const strips = [...curves.querySelectorAll(".strip")];
    const before = strips.map((one) => [...one.querySelector(".val").children]);
    const { first, last } = data;
    let at = null;
    const read = (step) => {
      at = step;
      strips.forEach((strip, index) => {
        const cursor = strip.querySelector(".cursor"), cell = strip.querySelector(".val");
        cursor.hidden = step === null;
        if (step === null) return cell.replaceChildren(...before[index]);
        cursor.style.left = `${(100 * (step - first)) / Math.max(last - first, 1)}%`;
        const value = data.curves[strip.dataset.metric][step];
        cell.replaceChildren(make("b", "", short(value)), make("span", "", `${data.unit} ${step}`));
      });
      const told = strips.map((one) => `${one.querySelector(".name b").firstChild.data.trim()} ${one.querySelector(".val b").textContent}`);
      by("heard").textContent = step === null ? "" : `${data.unit} ${step}: ${told.join(", ")}`;
    };
    curves.addEventListener("pointermove", (event) => {
      const box = strips[0].querySelector(".area").getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
      read(share < -0.02 || share > 1.02 ? null : Math.min(last, Math.max(first, Math.round(first + share * (last - first)))));
    });
    curves.addEventListener("pointerleave", () => read(null));
    curves.addEventListener("blur", () => read(null));
    curves.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: (at ?? first + 1) - 1, ArrowRight: (at ?? first - 1) + 1, Home: first, End: last, Escape: null }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      read(to === null ? null : Math.min(last, Math.max(first, to)));
    });
  }

  // charts: the pointer or the arrow keys read one value after another
  for (const chart of document.querySelectorAll(".chart")) {
    const hits = [...chart.querySelectorAll(".hit")], told = chart.parentElement.querySelector(".read");
    const read = (hit) => {
      for (const one of hits) one.classList.toggle("on", one === hit);
      told.textContent = hit ? hit.dataset.told : "";
    };
    chart.addEventListener("pointerover", (event) => read(event.target.closest(".hit")));
    chart.addEventListener("pointerleave", () => read(null));
    chart.addEventListener("blur", () => read(null));
    chart.addEventListener("keydown", (event) => {
      const at = hits.findIndex((hit) => hit.classList.contains("on")), end = hits.length - 1;
      const to = { ArrowLeft: at < 0 ? end : Math.max(at - 1, 0), ArrowRight: Math.min(at + 1, end), Home: 0, End: end, Escape: -1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      read(hits[to] ?? null);
    });
  }

  // tokens
  const list = by("list"), select = by("objective");
  if (!list) return;
  const tell = (top, index) => {
    const response = data.responses[top.response], share = top.shares[index];
    const facts = [["share of the gradient", share ? `${signed(100 * share, 3)} %` : "none"], ["ratio", short(top.ratio[index])]];
    if (top.weight) facts.push(["weight", short(top.weight[index])]);
    facts.push(["p, trainer", short(response.p[index])]);
    if (response.q) facts.push(["p, sampler", short(response.q[index])]);
    facts.push(["advantage", signed(response.advantage[index] ?? 0, 2)], ["token", `${index + 1} of ${response.tokens.length}`]);
    const did = Object.keys(top.did).filter((name) => top.did[name].includes(index));
    if (did.length) facts.unshift(["methods", did.join(", ")]);
    const whole = make("dl");
    for (const [name, value] of facts) {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd", "", value));
      whole.append(pair);
    }
    const why = response.advantage[index] === 0 ? "No gradient: its advantage is 0." : "No gradient under this objective.";
    by("card").replaceChildren(make("div", "big", response.tokens[index]), whole,
      make("p", "", share > 0 ? "Blue: the step makes it likelier." : share < 0 ? "Orange: the step makes it less likely." : why));
  };
  const draw = () => {
    const top = data.objectives[select.value];
    const most = Math.max(...top.flatMap((one) => one.shares.map(Math.abs)), 1e-30);
    list.replaceChildren(...top.map(({ response: key, share: total, shares }, number) => {
      const response = data.responses[key], article = make("article", "resp"), head = make("p", "h"), body = make("p", "b"), part = make("span", "sh");
      part.append(make("b", "", `${(100 * total).toFixed(2)} %`), " of the gradient");
      head.append(part);
      for (const [name, value] of [["step", response.step], ["response", response.id], ["reward", short(response.reward)]]) {
        const pair = make("span", "", `${name} `);
        pair.append(make("b", "", String(value)));
        head.append(pair);
      }
      body.append(make("span", "pr", response.prompt));
      response.tokens.forEach((text, index) => {
        const value = shares[index], size = Math.abs(value) / most;
        const level = value === 0 ? 0 : size > 0.5 ? 4 : size > 0.2 ? 3 : size > 0.06 ? 2 : size > 0.01 ? 1 : 0;
        const token = make("span", `t${level ? ` d${value > 0 ? 4 + level : 4 - level}` : ""}${value === 0 ? " off" : ""}`, text);
        token.tabIndex = -1;
        token.dataset.top = number;
        token.dataset.index = index;
        body.append(token);
      });
      article.append(head, body);
      return article;
    }));
    mark(list.querySelector(".d8, .d0") ?? list.querySelector(".t"), false);
  };
  const mark = (token, focus = true) => {
    if (!token) return;
    for (const one of list.querySelectorAll("[aria-current]")) {
      one.removeAttribute("aria-current");
      one.tabIndex = -1;
    }
    token.setAttribute("aria-current", "true");
    token.tabIndex = 0;
    tell(data.objectives[select.value][token.dataset.top], Number(token.dataset.index));
    if (focus) token.focus();
  };
  list.addEventListener("click", (event) => mark(event.target.closest(".t")));
  list.addEventListener("keydown", (event) => {
    const all = [...list.querySelectorAll(".t")], here = all.indexOf(event.target.closest(".t"));
    if (here < 0) return;
    const rows = [...list.querySelectorAll(".resp")], row = rows.indexOf(event.target.closest(".resp"));
    const to = { ArrowLeft: all[here - 1], ArrowRight: all[here + 1], ArrowUp: rows[row - 1]?.querySelector(".t"), ArrowDown: rows[row + 1]?.querySelector(".t"), Home: all[0], End: all[all.length - 1] }[event.key];
    if (to) {
      event.preventDefault();
      mark(to);
    }
  });
  select.addEventListener("change", draw);
  for (const one of document.querySelectorAll("[data-open]")) {
    one.addEventListener("click", () => {
      select.value = one.dataset.open;
      draw();
      by("tokens").scrollIntoView();
      select.focus({ preventScroll: true });
    });
  }
  draw();
})();
