"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const ACTIONS = data.actions;

  // Everything that comes from a file enters the page here, as text.
  const make = (tag, name, text) => {
    const one = document.createElement(tag);
    if (name) one.className = name;
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const known = (value) => value !== null && value !== undefined;
  const number = (value, digits = 3) => (known(value) ? String(Number(value.toPrecision(digits))).replace("-", "−") : "not known");
  const signed = (value) => (known(value) && value > 0 ? "+" : "") + number(value);
  const count = (value) => value.toLocaleString("en");

  // ---- quantities: nine shades between eight edges
  const probabilities = [0.9, 0.75, 0.5, 0.25, 0.1, 0.01, 0.002, 0.0001];
  const QUANTITIES = {
    surprisal: { edges: probabilities.map((one) => -Math.log(one)), kind: "q", says: "nats. The edges are probabilities of 0.9, 0.75, 0.5, 0.25, 0.1, 0.01, 0.002 and 0.0001", digits: 2 },
    entropy: { edges: [0.05, 0.1, 0.2, 0.4, 0.7, 1, 1.5, 2.5], kind: "q", says: "nats, of the next-token distribution that the token was drawn from" },
    advantage: { edges: [-2, -1, -0.5, -0.001, 0.001, 0.5, 1, 2], kind: "d", says: "orange is punished, blue rewarded" },
    ratio: { edges: [0.5, 0.8, 0.9, 0.98, 1.02, 1.1, 1.28, 2], kind: "d", says: "live over old probability. Orange fell, blue rose" },
    weight: { edges: [0.001, 0.5, 0.95, 0.999, 1.001, 1.05, 1.2, 2], kind: "d", says: "product over the methods. Orange is below 1, blue above" },
  };
  const column = (sample, name, place) => {
    const values = sample[name];
    return Array.isArray(values) ? values[place] : values;
  };
  const shade = (name, value) => {
    if (!known(value)) return "";
    const { edges, kind } = QUANTITIES[name];
    let bin = 0;
    while (bin < edges.length && value >= edges[bin]) bin += 1;
    return kind + bin;
  };

  // ---- what was done to each token: masks by method, made when first asked for
  const methods = Object.keys(data.methods);
  const everywhere = new Set(data.everywhere);
  const title = (key) => (data.methods[key] === key ? key : `${data.methods[key]} (${key})`);
  const done = (sample) => {
    if (sample.done) return sample.done;
    sample.done = new Map();
    for (const [key, actions] of Object.entries(sample.methods)) {
      for (const action of ACTIONS) {
        if (everywhere.has(`${key} ${action}`)) continue;
        for (const place of actions[action] ?? []) {
          if (!sample.done.has(place)) sample.done.set(place, []);
          sample.done.get(place).push({ key, action });
        }
      }
    }
    return sample.done;
  };
  const matches = (one) => (state.method === "all" || state.method === "any" || one.key === state.method) && (state.action === "any" || one.action === state.action);
  const selecting = () => state.method !== "all" || state.action !== "any";
  const hit = (sample, place) => (done(sample).get(place) ?? []).some(matches);

  const state = { quantity: "surprisal", method: "all", action: "any", step: "all", reward: "all", order: "influence", page: 0 };
  let shown = [], pages = [[]], points = [], focus = null;

  // ---- choosing
  const sum = (values) => values.reduce((total, one) => total + one, 0);
  const mean = (sample, name) => {
    const values = sample.tokens.map((_, place) => column(sample, name, place)).filter(known);
    return values.length ? sum(values) / values.length : -Infinity;
  };
  const touched = (sample) => (selecting() ? [...done(sample).values()].filter((all) => all.some(matches)).length : done(sample).size);
  const ORDERS = {
    influence: ["influence", (one) => -one.total],
    touched: ["tokens touched", (one) => -touched(one)],
    surprisal: ["mean surprisal", (one) => -mean(one, "surprisal")],
    entropy: ["mean entropy", (one) => -mean(one, "entropy")],
    rewardHigh: ["reward, high first", (one) => -(one.reward ?? -Infinity)],
    rewardLow: ["reward, low first", (one) => one.reward ?? Infinity],
    length: ["length", (one) => -one.tokens.length],
    file: ["as recorded", (one) => one.number],
  };
  function choose() {
    shown = data.responses.filter((one) =>
      (state.step === "all" || String(one.step) === state.step) &&
      (state.reward === "all" || String(one.reward) === state.reward) &&
      (!selecting() || touched(one) > 0));
    const value = new Map(shown.map((one) => [one, ORDERS[state.order][1](one)]));
    shown.sort((one, other) => value.get(one) - value.get(other) || one.number - other.number);
    // a page ends after 25 responses or 4,000 tokens, so that it is drawn at once
    pages = [[]];
    let tokens = 0;
    for (const one of shown) {
      const last = pages[pages.length - 1];
      if (last.length && (last.length >= 25 || tokens + one.tokens.length > 4000)) {
        pages.push([one]);
        tokens = one.tokens.length;
      } else {
        last.push(one);
        tokens += one.tokens.length;
      }
    }
    state.page = 0;
    focus = null;
    draw();
    plotAll();
    tell(null);
  }

  // ---- responses
  function draw() {
    const list = byId("list");
    list.replaceChildren(...pages[state.page].map(article));
    if (!shown.length) list.append(make("p", "empty", "No response matches. Relax one of the choices above."));
    const before = sum(pages.slice(0, state.page).map((one) => one.length));
    const text = shown.length ? `${count(before + 1)}–${count(before + pages[state.page].length)} of ${count(shown.length)}` : "0 of 0";
    for (const one of document.querySelectorAll(".place")) one.textContent = text;
    for (const one of document.querySelectorAll("[data-go]")) {
      const to = state.page + Number(one.dataset.go);
      one.disabled = to < 0 || to >= pages.length;
    }
  }
  function article(sample) {
    const whole = make("article");
    const head = make("h3");
    head.append(make("span", "", `optimizer step ${sample.step}`), make("span", "", `response ${sample.response}`));
    if (known(sample.group)) head.append(make("span", "", `group ${sample.group}`));
    const told = [["reward", known(sample.reward) ? number(sample.reward) : null]];
    if (typeof sample.advantage === "number") told.push(["advantage", signed(sample.advantage)]);
    told.push(["influence", number(sample.total)], ["touched", `${touched(sample)} of ${sample.tokens.length}`]);
    for (const [name, value] of told) {
      if (value === null) continue;
      const one = make("span", "", `${name} `);
      one.append(make("b", "", value));
      head.append(one);
    }
    whole.append(head);
    if (sample.prompt) whole.append(make("div", "prompt", sample.prompt));
    const text = make("div", selecting() ? "text some" : "text");
    text.setAttribute("role", "listbox");
    text.setAttribute("aria-orientation", "horizontal");
    text.setAttribute("aria-label", `Tokens of response ${sample.response}, optimizer step ${sample.step}`);
    text.sample = sample;
    sample.tokens.forEach((token, place) => {
      const one = make("span", "", token === "" ? `⟨${sample.ids[place] ?? "no text"}⟩` : token);
      one.setAttribute("role", "option");
      one.setAttribute("aria-selected", "false");
      one.tabIndex = place ? -1 : 0;
      one.place = place;
      dress(one, sample, place);
      text.append(one);
      if (token.includes("↵")) text.append(document.createElement("br"));
    });
    sample.text = text;
    whole.append(text);
    return whole;
  }
  function dress(one, sample, place) {
    const actions = (done(sample).get(place) ?? []).map((each) => each.action);
    const names = ["t", shade(state.quantity, column(sample, state.quantity, place)), ...actions];
    if (sample.tokens[place] === "") names.push("id");
    if (selecting() && hit(sample, place)) names.push("hit");
    one.className = names.filter(Boolean).join(" ");
  }
  function recolour() {
    for (const text of document.querySelectorAll(".text")) for (const one of text.querySelectorAll(".t")) dress(one, text.sample, one.place);
    legend();
  }

  // ---- one token
  const VERBS = { dropped: "dropped it", boosted: "boosted it", damped: "damped it", clipped: "clipped it", regularised: "regularised it", unclipped: "took its trust region away" };
  function tell(sample, place) {
    const panel = byId("token");
    if (!sample) {
      panel.replaceChildren(make("p", "note", "Point at a token, or go to one with Tab and the arrow keys: its numbers and what each method did to it are shown here."));
      mark(null);
      return;
    }
    const surprisal = column(sample, "surprisal", place);
    const rows = [
      ["surprisal", number(surprisal)], ["probability", known(surprisal) ? number(Math.exp(-surprisal)) : "not known"],
      ["entropy", number(column(sample, "entropy", place))], ["advantage", known(column(sample, "advantage", place)) ? signed(column(sample, "advantage", place)) : "not known"],
      ["ratio", known(column(sample, "ratio", place)) ? number(column(sample, "ratio", place), 4) : "not known"], ["weight", number(column(sample, "weight", place))],
      ["influence", number(column(sample, "influence", place) ?? 0)],
    ];
    const bonus = column(sample, "bonus", place);
    if (known(bonus) && bonus !== 0) rows.push(["bonus", signed(bonus)]);
    const gate = column(sample, "gate", place);
    if (known(gate) && gate !== 1) rows.push(["gate", number(gate)]);
    const numbers = make("dl");
    for (const [name, value] of rows) {
      const row = make("div");
      row.append(make("dt", "", name), make("dd", "", value));
      numbers.append(row);
    }
    const list = make("ul");
    for (const { key, action } of done(sample).get(place) ?? []) {
      const own = (sample.methods[key].weight ?? []).find(([at]) => at === place);
      const added = (sample.methods[key].bonus ?? []).find(([at]) => at === place);
      const gated = (sample.methods[key].gate ?? []).find(([at]) => at === place);
      const by = [own && `weight ${number(own[1])}`, added && `bonus ${signed(added[1])}`, gated && `gate ${number(gated[1])}`].filter(Boolean);
      const how = (action === "boosted" || action === "damped") && by.length ? `: ${by.join(", ")}` : "";
      const line = make("li");
      const sign = make("span", `t ${action}`, "ab");
      sign.setAttribute("aria-hidden", "true");
      const said = make("span");
      said.append(make("b", "", title(key)), ` ${VERBS[action]}${how}`);
      line.append(sign, said);
      list.append(line);
    }
    if (!list.childElementCount) list.append(make("li", "note", "No method touched it."));
    const text = sample.tokens[place];
    const id = known(sample.ids[place]) ? `, id ${sample.ids[place]}` : "";
    panel.replaceChildren(make("div", "shown", text === "" ? "(no text of its own)" : text), make("div", "note", `token ${place + 1} of ${sample.tokens.length}${id}, optimizer step ${sample.step}, response ${sample.response}`), numbers, list);
    mark(points.find((one) => one.sample === sample && one.place === place) ?? null);
  }
  function go(sample, place) {
    const page = pages.findIndex((one) => one.includes(sample));
    if (page < 0) return;
    if (page !== state.page || !sample.text?.isConnected) {
      state.page = page;
      draw();
    }
    const tokens = sample.text.querySelectorAll(".t");
    const at = Math.max(0, Math.min(place, tokens.length - 1));
    for (const one of sample.text.querySelectorAll('.t[tabindex="0"]')) one.tabIndex = -1;
    tokens[at].tabIndex = 0;
    tokens[at].focus({ preventScroll: true });
    tokens[at].scrollIntoView({ block: "nearest" });
    const box = tokens[at].getBoundingClientRect();
    if (box.top < 120) window.scrollBy(0, box.top - 160); // from under the bar
    if (box.bottom > window.innerHeight - 40) window.scrollBy(0, 120);
  }
  function neighbour(sample, place, direction) {
    const order = [...done(sample).keys()].filter((one) => !selecting() || hit(sample, one)).sort((one, other) => one - other);
    const next = direction > 0 ? order.find((one) => one > place) : order.findLast((one) => one < place);
    if (next !== undefined) return [sample, next];
    for (let at = shown.indexOf(sample) + direction; at >= 0 && at < shown.length; at += direction) {
      const places = [...done(shown[at]).keys()].filter((one) => !selecting() || hit(shown[at], one));
      if (places.length) return [shown[at], direction > 0 ? Math.min(...places) : Math.max(...places)];
    }
    return [sample, place];
  }
  const tokenOf = (event) => (event.target instanceof Element ? event.target.closest(".text > .t") : null);
  byId("list").addEventListener("mouseover", (event) => {
    const one = tokenOf(event);
    if (one) tell(one.parentElement.sample, one.place);
  });
  byId("list").addEventListener("mouseleave", () => tell(...(focus ?? [null])));
  byId("list").addEventListener("click", (event) => {
    const one = tokenOf(event);
    if (one) go(one.parentElement.sample, one.place);
  });
  byId("list").addEventListener("focusin", (event) => {
    const one = tokenOf(event);
    if (!one) return;
    focus = [one.parentElement.sample, one.place];
    one.setAttribute("aria-selected", "true");
    tell(...focus);
  });
  byId("list").addEventListener("focusout", (event) => tokenOf(event)?.setAttribute("aria-selected", "false"));
  byId("list").addEventListener("keydown", (event) => {
    const one = tokenOf(event);
    if (!one || event.ctrlKey || event.metaKey || event.altKey) return;
    const sample = one.parentElement.sample, at = shown.indexOf(sample), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    let to = null;
    if (step) to = [sample, one.place + step];
    else if (event.key === "Home") to = [sample, 0];
    else if (event.key === "End") to = [sample, sample.tokens.length - 1];
    else if (event.key === "ArrowDown") to = [shown[Math.min(at + 1, shown.length - 1)], 0];
    else if (event.key === "ArrowUp") to = [shown[Math.max(at - 1, 0)], 0];
    else if (event.key === "n") to = neighbour(sample, one.place, 1);
    else if (event.key === "p") to = neighbour(sample, one.place, -1);
    if (!to) return;
    event.preventDefault();
    go(...to);
  });

  // ---- quadrants
  const plot = byId("plot");
  const BOX = { left: 42, right: 8, top: 16, bottom: 30 };
  const brush = () => plot.getContext("2d", { willReadFrequently: true });
  let backdrop = null;
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  function plotAll() {
    points = [];
    let total = 0, entropies = 0;
    for (const sample of shown) {
      for (let place = 0; place < sample.tokens.length; place += 1) {
        const surprisal = column(sample, "surprisal", place), advantage = column(sample, "advantage", place), entropy = column(sample, "entropy", place);
        if (known(entropy)) { total += entropy; entropies += 1; }
        const acts = (done(sample).get(place) ?? []).filter(matches);
        if (known(surprisal) && known(advantage)) points.push({ sample, place, surprisal, advantage, actions: acts.length ? acts : null });
      }
    }
    if (!plotAll.split) byId("split").value = (entropies ? total / entropies : 2.3).toFixed(2);
    picture();
    counts();
  }
  byId("split").addEventListener("input", () => { plotAll.split = true; picture(); counts(); });
  const split = () => Math.max(0, Number(byId("split").value) || 0);

  const SHAPES = {
    dropped: (c, x, y) => { c.moveTo(x - 4, y - 4); c.lineTo(x + 4, y + 4); c.moveTo(x - 4, y + 4); c.lineTo(x + 4, y - 4); },
    boosted: (c, x, y) => { c.moveTo(x, y - 4); c.lineTo(x + 4, y + 3); c.lineTo(x - 4, y + 3); c.closePath(); },
    damped: (c, x, y) => { c.moveTo(x, y + 4); c.lineTo(x + 4, y - 3); c.lineTo(x - 4, y - 3); c.closePath(); },
    clipped: (c, x, y) => { c.rect(x - 3.5, y - 3.5, 7, 7); },
    regularised: (c, x, y) => { c.moveTo(x, y - 5); c.lineTo(x + 5, y); c.lineTo(x, y + 5); c.lineTo(x - 5, y); c.closePath(); },
    unclipped: (c, x, y) => { c.moveTo(x + 5, y); c.arc(x, y, 5, 0, 7); },
  };
  function picture() {
    const width = plot.clientWidth, height = plot.clientHeight, scale = window.devicePixelRatio || 1;
    if (!width) return;
    plot.width = width * scale;
    plot.height = height * scale;
    const c = brush();
    c.scale(scale, scale);
    let right = 1, up = 0.5;
    for (const one of points) { right = Math.max(right, one.surprisal); up = Math.max(up, Math.abs(one.advantage)); }
    right = Math.max(right, split()) * 1.04;
    up *= 1.15;
    const wide = width - BOX.left - BOX.right, high = height - BOX.top - BOX.bottom;
    const x = (value) => BOX.left + Math.sqrt(Math.max(0, value) / right) * wide;
    const y = (value) => BOX.top + (1 - (value / up + 1) / 2) * high;
    c.clearRect(0, 0, width, height);
    c.font = `11px ${colour("sans")}`;
    c.fillStyle = colour("soft");
    c.strokeStyle = colour("rule");
    c.lineWidth = 1;
    c.strokeRect(BOX.left, BOX.top, wide, high);
    c.textAlign = "center";
    let last = -40;
    for (const tick of [0, 0.1, 0.5, 1, 2, 4, 6, 9, 12, 16, 25]) {
      if (tick > right || x(tick) < last + 26) continue;
      last = x(tick);
      c.fillText(String(tick), last, height - 16);
    }
    c.fillText("surprisal, nats", BOX.left + wide / 2, height - 3);
    c.textAlign = "right";
    const tick = Number((up * 0.75).toPrecision(1));
    for (const value of [-tick, 0, tick]) c.fillText(number(value, 2), BOX.left - 5, y(value) + 4);
    c.textAlign = "left";
    c.fillText("advantage", 0, 9);
    c.strokeStyle = colour("soft");
    c.setLineDash([4, 3]);
    c.beginPath();
    c.moveTo(x(split()), BOX.top); c.lineTo(x(split()), BOX.top + high);
    c.moveTo(BOX.left, y(0)); c.lineTo(BOX.left + wide, y(0));
    c.stroke();
    c.setLineDash([]);
    // a fixed spread by place, the same at each drawing
    for (const one of points) {
      const noise = Math.sin((one.sample.number + 1) * 12.9898 + one.place * 78.233) * 43758.5453;
      one.x = x(one.surprisal);
      one.y = y(one.advantage) + (noise - Math.floor(noise) - 0.5) * 9;
    }
    c.fillStyle = colour("soft");
    c.globalAlpha = points.length > 5000 ? 0.25 : 0.5;
    for (const one of points) if (!one.actions) c.fillRect(one.x - 1, one.y - 1, 2, 2);
    const many = points.filter((one) => one.actions).length > 1500;
    c.globalAlpha = many ? 0.45 : 0.85;
    c.lineWidth = many ? 0.9 : 1.4;
    for (const action of ACTIONS) {
      c.strokeStyle = colour(action);
      c.beginPath();
      for (const one of points) if (one.actions?.some((each) => each.action === action)) SHAPES[action](c, one.x, one.y);
      c.stroke();
    }
    c.globalAlpha = 1;
    backdrop = points.length ? c.getImageData(0, 0, plot.width, plot.height) : null;
  }
  function mark(point) {
    if (!backdrop) return;
    const c = brush();
    c.putImageData(backdrop, 0, 0);
    if (!point) return;
    c.strokeStyle = colour("ink");
    c.lineWidth = 2;
    c.beginPath();
    c.arc(point.x, point.y, 7, 0, 7);
    c.stroke();
  }
  function nearest(event) {
    const box = plot.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    let best = null, least = 100;
    for (const one of points) {
      // a touched token is what one aims at
      const distance = (one.x - px) ** 2 + (one.y - py) ** 2 - (one.actions ? 12 : 0);
      if (distance < least) { best = one; least = distance; }
    }
    return best;
  }
  plot.addEventListener("mousemove", (event) => {
    const one = nearest(event);
    if (one) tell(one.sample, one.place);
  });
  plot.addEventListener("mouseleave", () => tell(...(focus ?? [null])));
  plot.addEventListener("click", (event) => {
    const one = nearest(event);
    if (one) go(one.sample, one.place);
  });
  function counts() {
    const at = split();
    const table = make("table"), head = make("thead"), body = make("tbody"), top = make("tr");
    const used = ACTIONS.filter((action) => points.some((one) => one.actions?.some((each) => each.action === action)));
    for (const name of ["", "tokens", ...used]) {
      const cell = make("th", "", used.includes(name) ? undefined : name);
      cell.scope = "col";
      if (used.includes(name)) {
        cell.setAttribute("aria-label", name);
        cell.title = name;
        cell.append(sign(name));
      }
      top.append(cell);
    }
    head.append(top);
    const said = [];
    for (const [name, test] of [
      ["rewarded, rare", (one) => one.advantage > 0 && one.surprisal >= at], ["rewarded, common", (one) => one.advantage > 0 && one.surprisal < at],
      ["punished, rare", (one) => one.advantage < 0 && one.surprisal >= at], ["punished, common", (one) => one.advantage < 0 && one.surprisal < at],
      ["advantage 0", (one) => one.advantage === 0],
    ]) {
      const inside = points.filter(test), row = make("tr"), first = make("th", "", name);
      first.scope = "row";
      row.append(first, make("td", "", count(inside.length)));
      for (const action of used) row.append(make("td", "", count(inside.filter((one) => one.actions?.some((each) => each.action === action)).length)));
      body.append(row);
      said.push(`${name} ${inside.length}`);
    }
    table.append(head, body);
    byId("counts").replaceChildren(table);
    plot.setAttribute("aria-label", `Scatter of ${points.length} tokens, advantage against surprisal. ${said.join(", ")}. The table below has the counts.`);
    byId("shapes").replaceChildren(...used.map((action) => {
      const one = make("span");
      one.append(sign(action), action);
      return one;
    }));
  }
  function sign(action) {
    const sign = document.createElement("canvas");
    sign.width = sign.height = 26;
    sign.className = "sign";
    sign.setAttribute("aria-hidden", "true");
    const c = sign.getContext("2d");
    c.scale(2, 2);
    c.strokeStyle = colour(action);
    c.lineWidth = 1.4;
    c.beginPath();
    SHAPES[action](c, 6.5, 6.5);
    c.stroke();
    return sign;
  }

  // ---- legends and choices
  function legend() {
    const { edges, kind, says, digits = 4 } = QUANTITIES[state.quantity];
    const scale = byId("scale");
    scale.replaceChildren();
    for (let bin = 0; bin <= edges.length; bin += 1) {
      const step = make("div");
      step.append(make("i", kind + bin), make("b", "", bin ? number(edges[bin - 1], digits) : ""));
      scale.append(step);
    }
    scale.append(make("span", "", `${state.quantity}: ${says}.`));
    scale.setAttribute("aria-label", `Colour scale of ${state.quantity}: ${says}. Nine shades between ${edges.map((one) => number(one, digits)).join(", ")}.`);
    const marks = byId("marks");
    marks.replaceChildren(...ACTIONS.filter((action) => data.done.includes(action)).map((action) => {
      const one = make("span");
      one.append(make("span", `t ${action}`, "token"), ` ${action}`);
      return one;
    }));
  }
  function options(id, entries) {
    const select = byId(id);
    select.replaceChildren(...entries.map(([value, text]) => {
      const one = make("option", "", text);
      one.value = value;
      return one;
    }));
    select.value = state[id];
    select.addEventListener("change", () => {
      state[id] = select.value;
      if (id === "quantity") recolour();
      else choose();
    });
  }
  const there = (name) => data.responses.some((one) => (Array.isArray(one[name]) ? one[name].length : known(one[name])));
  const quantities = Object.keys(QUANTITIES).filter(there);
  if (!quantities.includes(state.quantity)) state.quantity = quantities[0] ?? "surprisal";
  data.responses.forEach((one, place) => { one.number = place; });
  const distinct = (name) => [...new Set(data.responses.map((one) => one[name]))].filter(known).sort((one, other) => one - other);
  options("quantity", quantities.map((one) => [one, one]));
  options("method", [["all", "all"], ["any", "touched by any method"], ...methods.filter((key) => data.acts[key].length).map((key) => [key, `touched by ${title(key)}`])]);
  options("action", [["any", "any"], ...ACTIONS.filter((one) => data.done.includes(one)).map((one) => [one, one])]);
  options("step", [["all", "all"], ...distinct("step").map((one) => [String(one), String(one)])]);
  options("reward", [["all", "all"], ...distinct("reward").slice(0, 50).map((one) => [String(one), number(one)])]);
  options("order", Object.entries(ORDERS).map(([key, [text]]) => [key, text]));
  for (const one of document.querySelectorAll("[data-go]")) {
    one.addEventListener("click", () => {
      state.page = Math.max(0, Math.min(state.page + Number(one.dataset.go), pages.length - 1));
      draw();
      byId("samples").scrollIntoView();
      byId("samples").focus({ preventScroll: true });
    });
  }

  // ---- head
  const tokens = sum(data.responses.map((one) => one.tokens.length));
  byId("what").textContent = `${data.source}: ${count(data.responses.length)} responses, ${count(tokens)} tokens, optimizer steps ${distinct("step").join(", ")}. Methods: ${methods.map(title).join(", ") || "none"}.`;
  for (const one of data.notes) byId("notes").append(make("li", "", one));
  for (const one of data.everywhere) {
    const [key, action] = one.split(" ");
    byId("notes").append(make("li", "", `${title(key)}: every token is ${action}; not marked.`));
  }
  const idle = methods.filter((key) => !data.acts[key].length && !data.everywhere.some((one) => one.startsWith(`${key} `)));
  if (idle.length) byId("notes").append(make("li", "", `Touched none of these tokens: ${idle.map(title).join(", ")}.`));

  // ---- theme
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const stored = (value) => {
    try {
      if (value !== undefined) localStorage.setItem("rlstab-theme", value);
      return localStorage.getItem("rlstab-theme");
    } catch {
      return null; // a browser may forbid storage to files
    }
  };
  let chosen = stored();
  function paint() {
    const theme = chosen || (dark.matches ? "dark" : "light");
    root.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
    byId("theme").setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
    if (points.length) { picture(); counts(); }
  }
  byId("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    stored(chosen);
    paint();
  });
  dark.addEventListener("change", paint);
  window.addEventListener("resize", () => { picture(); });

  paint();
  legend();
  choose();
})();
