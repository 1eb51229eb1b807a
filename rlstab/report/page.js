(async () => {
  // gzip in base64, as `packed` in render.py writes it; a script runs by its digest in the head of the page
  const unpacked = (id) => {
    const bytes = Uint8Array.from(atob(by(id).textContent), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  document.head.append(make("script", "", await unpacked("plotly")));
  const data = JSON.parse(await unpacked("data"));
  const state = { setting: data.settings[0].key, outcome: null, off: new Set(), seeds: false, band: "quartiles", smooth: 1, axis: "rollout", print: false };
  const DASHES = ["solid", "dash", "dot"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x"];

  // plotly reads a few tags and entities in its texts: what comes from runs must not be read so
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  // plotly takes numbers: a variable of the style sheet stands for two colours, one for each theme
  const sample = document.body.appendChild(make("span", "status"));
  const variable = (name) => {
    sample.style.color = `var(${name})`;
    return getComputedStyle(sample).color;
  };
  const faded = (colour, alpha) => colour.replace(/rgba?\(([^)]*)\)/, `rgba($1, ${alpha})`);
  const sans = getComputedStyle(root).getPropertyValue("--sans").trim();

  // ---- numbers
  const moving = (values, reach) =>
    values.map((_, at) => {
      if (values[at] === null) return null;
      const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((one) => one !== null);
      return near.reduce((sum, one) => sum + one, 0) / near.length;
    });
  const at = (sorted, share) => {
    const place = share * (sorted.length - 1), low = Math.floor(place), high = Math.ceil(place);
    return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
  };
  // mean and band over seeds; a point needs half of them, else those that go on would speak for all
  function summary(seeds, log) {
    const mean = [], low = [], high = [];
    for (let i = 0; i < seeds[0].length; i++) {
      const values = seeds.map((one) => one[i]).filter((one) => one !== null && (!log || one > 0)).sort((a, b) => a - b);
      const enough = values.length * 2 >= seeds.length && values.length > 0;
      const middle = log ? at(values, 0.5) : values.reduce((sum, one) => sum + one, 0) / values.length;
      mean.push(enough ? middle : null);
      const [from, to] = state.band === "quartiles" ? [0.25, 0.75] : [0, 1];
      low.push(enough ? at(values, from) : null);
      high.push(enough ? at(values, to) : null);
    }
    return { mean, low, high };
  }
  // ---- what is drawn over: rollouts, or what a run had spent by then
  const clocks = () => data.clocks[state.setting] ?? {};
  const costs = (unit) => Object.values(clocks()).flatMap((seeds) => Object.values(seeds)).filter((one) => one[unit]).map((one) => one[unit].at(-1));
  const most = (unit) => Math.max(1e-9, ...costs(unit));
  const TIMES = [["hours", 3600, 7200], ["minutes", 60, 120], ["seconds", 1, 0]];
  function across() {
    if (state.axis === "tokens") return { title: "tokens sampled", scale: 1, hover: "%{x:.3s} tokens", format: "~s" };
    if (state.axis === "rollout") return { title: "rollout", scale: 1, hover: "rollout %{x}", format: "~g" };
    const [unit, scale] = TIMES.find(([, , least]) => most("seconds") >= least);
    return { title: `training time, ${unit}`, scale, hover: `%{x:.3~g} ${unit}`, format: "~g" };
  }
  // value at a place between points that rise; null beyond them
  function between(from, to, place) {
    if (place < from[0] || place > from.at(-1)) return null;
    let low = 0, high = from.length - 1;
    while (high - low > 1) { const half = (low + high) >> 1; if (from[half] <= place) low = half; else high = half; }
    return from[high] === from[low] ? to[high] : to[low] + ((to[high] - to[low]) * (place - from[low])) / (from[high] - from[low]);
  }
  // each seed stands at its own cost, their mean at the mean of their costs; costs only rise
  function over(series, method) {
    if (state.axis === "rollout") return { ...series, own: series.seeds.map(() => series.x) };
    const clock = clocks()[method.key] ?? {}, { scale } = across();
    const kept = series.names.map((_, index) => index).filter((index) => clock[series.names[index]]?.[state.axis]);
    if (!kept.length) return null;
    const own = kept.map((index) => {
      const one = clock[series.names[index]];
      return series.x.map((rollout) => { const cost = between(one.rollout, one[state.axis], rollout); return cost === null ? null : cost / scale; });
    });
    let last = 0;
    const x = series.x.map((_, at) => {
      const costs = own.map((one) => one[at]).filter((one) => one !== null);
      return (last = Math.max(last, costs.length ? costs.reduce((sum, one) => sum + one, 0) / costs.length : last));
    });
    return { ...series, x, own, seeds: kept.map((index) => series.seeds[index]), names: kept.map((index) => series.names[index]) };
  }
  function curve(metric, method, least = 1) {
    const series = data.curves[state.setting]?.[method.key]?.[metric];
    if (!series) return null;
    const sampled = !metric.startsWith("eval/");
    const reach = sampled ? (Math.max(state.smooth, least) - 1) / 2 : 0;
    return { x: data.grids[series.grid], seeds: series.seeds.map((one) => (reach ? moving(one, reach) : one)), names: series.names, sampled };
  }

  // ---- figures
  const shown = () => data.methods.filter((one) => !state.off.has(one.key));
  const colour = (method) => variable(`--m${method.colour}`);
  function layout(x, y) {
    const axis = { tickformat: "~g", gridcolor: variable("--grid"), linecolor: variable("--faint"), zeroline: false, ticks: "outside", ticklen: 4, tickcolor: variable("--faint"), fixedrange: false };
    return {
      font: { family: sans, size: 12, color: variable("--soft") },
      paper_bgcolor: variable("--paper"), plot_bgcolor: variable("--paper"),
      margin: { l: 46, r: 16, t: 10, b: state.print ? 64 : 42 }, showlegend: state.print, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" }, hovermode: "x unified", dragmode: "zoom",
      hoverlabel: { bgcolor: variable("--raised"), bordercolor: variable("--faint"), font: { color: variable("--ink"), family: sans, size: 12 }, namelength: 40 },
      xaxis: { ...axis, showgrid: false, showline: true, ...x }, yaxis: { ...axis, automargin: "left", ...y },
    };
  }
  const longest = () => Math.max(1, ...Object.values(data.curves[state.setting] ?? {}).flatMap((one) => Object.values(one)).map((one) => data.grids[one.grid].at(-1)));
  function curves(panel) {
    const metric = panel.dataset.metric, about = data.metrics[metric], log = panel.dataset.log !== undefined, traces = [], said = [];
    let sparse = false;
    for (const method of shown()) {
      const raw = curve(metric, method), series = raw && over(raw, method);
      if (!series) continue;
      // where runs end in two clusters, no run ends near their mean: the lost ones are drawn alone
      const lost = new Set(data.lost[state.setting]?.[method.key]), alive = series.names.map((_, i) => i).filter((i) => !lost.has(series.names[i]));
      const single = state.seeds || lost.size > 0;
      const name = plain(method.name), mean = summary(alive.length ? alive.map((i) => series.seeds[i]) : series.seeds, log);
      const line = { color: colour(method), width: method.baseline ? 2.4 : 2, dash: DASHES[method.dash] };
      const kept = series.x.map((_, i) => i).filter((i) => mean.mean[i] !== null);
      if (!kept.length) sparse = true;
      if (kept.length && series.seeds.length > 1 && state.band !== "none" && !single) {
        const back = [...kept].reverse();
        traces.push({ x: [...kept, ...back].map((i) => series.x[i]), y: [...kept.map((i) => mean.high[i]), ...back.map((i) => mean.low[i])], fill: "toself", fillcolor: faded(line.color, 0.13), line: { width: 0 }, mode: "lines", hoverinfo: "skip", meta: { method: method.key, part: "band" } });
      }
      if (single && series.seeds.length > 1)
        series.seeds.forEach((one, index) => traces.push({ x: series.own[index], y: one, mode: kept.length ? "lines" : "lines+markers", marker: { size: 4 }, line: { color: faded(line.color, lost.has(series.names[index]) ? 0.75 : 0.38), width: 1, dash: lost.has(series.names[index]) ? "dot" : "solid" }, hoverinfo: "skip", name: `${name} seed ${plain(series.names[index])}`, meta: { method: method.key, part: "seed" } }));
      if (!kept.length) continue;
      traces.push({ x: series.x, y: mean.mean, connectgaps: true, mode: series.sampled ? "lines" : "lines+markers", line, marker: { size: 6, symbol: SYMBOLS[method.marker] }, name, hovertemplate: "%{y:.4~g}", meta: { method: method.key, part: "mean" } });
      said.push(`${method.name} ends at ${number(mean.mean[kept.at(-1)])}`);
    }
    if (!traces.length && sparse) return { traces, said, why: "Never recorded in half of the runs at once, so there is no mean. Tick “single seeds” to see the runs." };
    const means = traces.filter((one) => one.meta.part === "mean").flatMap((one) => one.y).filter((one) => one !== null);
    if (panel.closest("#touched-figures") && means.length && means.every((one) => one === 0)) return { traces: [], said, why: "0 throughout for every method." };
    const decades = log && means.length ? Math.log10(Math.max(...means) / Math.min(...means)) : 0;
    // over less than half a decade the digits alone would leave one tick, or none
    const narrow = () => { const raw = (Math.max(...means) - Math.min(...means)) / 3 || 1, power = 10 ** Math.floor(Math.log10(raw)); return { tick0: 0, dtick: `L${Number(([1, 2, 5, 10].find((one) => one * power >= raw) * power).toPrecision(1))}` }; };
    const y = log ? { type: "log", ...(decades > 0.5 ? { dtick: decades > 1.5 ? 1 : "D2" } : narrow()) } : { rangemode: about?.zero && panel.dataset.first === undefined ? "tozero" : "normal" };
    if (panel.closest(".small")) y.nticks = 5;
    const below = across(), end = state.axis === "rollout" ? longest() : Math.max(...traces.flatMap((one) => one.x));
    return { traces, layout: layout({ title: { text: below.title, standoff: 6 }, range: [0, 1.015 * end], tickformat: below.format, unifiedhovertitle: { text: below.hover }, spikecolor: variable("--soft"), spikethickness: 1, spikedash: "solid" }, y), said };
  }
  function trajectory() {
    const traces = [], said = [];
    for (const method of shown()) {
      const aside = curve("tokens/entropy", method, 3), up = curve("reward/mean", method, 3);
      if (!aside || !up) continue;
      const name = plain(method.name), line = { color: colour(method), width: 1.6, dash: DASHES[method.dash] };
      const points = up.x.map((_, i) => i).filter((i) => i < aside.x.length && aside.x[i] === up.x[i]);
      if (state.seeds)
        up.seeds.forEach((one, k) => {
          const other = aside.seeds[aside.names.indexOf(up.names[k])];
          if (other) traces.push({ x: points.map((i) => other[i]), y: points.map((i) => one[i]), mode: "lines", line: { color: faded(line.color, 0.3), width: 1 }, hoverinfo: "skip", meta: { method: method.key, part: "seed" } });
        });
      const x = summary(aside.seeds).mean, y = summary(up.seeds).mean, end = points.filter((i) => x[i] !== null && y[i] !== null).at(-1);
      if (end === undefined) continue;
      const last = points.map((i) => i === end);
      traces.push({
        x: points.map((i) => x[i]), y: points.map((i) => y[i]), mode: "lines+markers", line, name, customdata: points.map((i) => up.x[i]),
        marker: { color: line.color, symbol: SYMBOLS[method.marker], size: last.map((one) => (one ? 11 : 4)), opacity: last.map((one) => (one ? 1 : 0.7)), line: { color: variable("--paper"), width: last.map((one) => (one ? 1.5 : 0)) } },
        hovertemplate: "rollout %{customdata}<br>entropy %{x:.3~g} nats<br>reward %{y:.3~g}", meta: { method: method.key, part: "mean" },
      });
      said.push(`${method.name} ends at entropy ${number(x[end])}, reward ${number(y[end])}`);
    }
    return { traces, layout: { ...layout({ title: { text: "entropy, nats per token", standoff: 6 }, showgrid: true }, { title: { text: "training reward", standoff: 8 } }), hovermode: "closest" }, said };
  }
  function sweep(panel) {
    const one = data.sweeps[Number(panel.dataset.sweep)], traces = [], said = [], logs = one.log, outcome = data.outcomes[state.outcome]?.title ?? "";
    panel.querySelector(".title").textContent = `${outcome} against ${one.key}`;
    const many = shown().filter((method) => one.methods[method.key]);
    many.forEach((method, index) => {
      const points = one.methods[method.key], values = points.outcomes[state.outcome] ?? [], name = plain(method.name), line = { color: colour(method), width: 2, dash: DASHES[method.dash] };
      // methods side by side, so that their intervals do not cover each other
      const shift = index - (many.length - 1) / 2;
      const x = points.x.map((value) => (logs ? value * 1.012 ** shift : value + (shift * one.span) / 150));
      const y = values.map((seeds) => (seeds.length ? at(seeds, 0.5) : null));
      if (y.every((value) => value === null)) return;
      traces.push({
        x, y, mode: "lines+markers", line, name,
        customdata: points.x.map((value, i) => [plain(one.labels[one.values.indexOf(value)]), plain(points.collapsed[i])]),
        marker: { size: 7, symbol: points.stable.map((good) => (good ? SYMBOLS[method.marker] : `${SYMBOLS[method.marker]}-open`)), line: { width: 1.6, color: line.color } },
        hovertemplate: "%{customdata[0]}: %{y:.3~g}<br>lost %{customdata[1]}", meta: { method: method.key, part: "mean" },
      });
      const each = values.flatMap((seeds, i) => seeds.map((value) => [x[i], value]));
      traces.push({ x: each.map(([value]) => value), y: each.map(([, value]) => value), mode: "markers", marker: { size: 4, color: faded(line.color, 0.6) }, hoverinfo: "skip", meta: { method: method.key, part: "seed" } });
      const top = points.x.indexOf(points.highest);
      if (top >= 0 && y[top] !== null) traces.push({ x: [x[top]], y: [y[top]], mode: "markers", marker: { size: 18, symbol: "circle-open", color: line.color, line: { width: 2 } }, hoverinfo: "skip", meta: { method: method.key, part: "highest" } });
      said.push(`${method.name}: highest stable ${points.told}`);
    });
    const ticks = { tickvals: one.values, ticktext: one.labels.map(plain) };
    const why = traces.length || state.off.size ? undefined : "No run of the sweep has this outcome.";
    return { traces, why, layout: { ...layout({ type: logs ? "log" : "linear", title: { text: plain(one.key), standoff: 6 }, ...ticks }, { rangemode: "tozero", title: { text: plain(outcome), standoff: 8 } }), hovermode: "closest" }, said };
  }
  function survival() {
    const traces = [], said = [];
    for (const method of shown()) {
      const [x, y, low, high] = data.survival[state.setting]?.[method.key] ?? [[]];
      if (!x.length) continue;
      const line = { color: colour(method), width: 2, dash: DASHES[method.dash], shape: "hv" }, name = plain(method.name), bare = { ...line, width: 0 };
      // a point is drawn up to the next one, so the band is two steps of the same shape
      if (low.some((one) => one !== null)) {
        const within = (ends) => ends.map((one, i) => one ?? y[i]);
        traces.push({ x, y: within(low), mode: "lines", line: bare, hoverinfo: "skip", meta: { method: method.key, part: "band" } });
        traces.push({ x, y: within(high), mode: "lines", line: bare, fill: "tonexty", fillcolor: faded(line.color, 0.13), hoverinfo: "skip", meta: { method: method.key, part: "band" } });
      }
      traces.push({ x, y, mode: "lines", line, name, hovertemplate: "%{y:.2f}", meta: { method: method.key, part: "mean" } });
      said.push(`${method.name}: ${number(y.at(-1))} not lost`);
    }
    return { traces, layout: layout({ title: { text: "rollout", standoff: 6 }, unifiedhovertitle: { text: "rollout %{x}" } }, { range: [0, 1.04] }), said };
  }
  const DRAW = { curve: curves, trajectory, sweep, survival };

  function draw(panel) {
    const plot = panel.querySelector(".plot");
    const { traces, layout: frame, said, why } = DRAW[panel.dataset.figure](panel);
    const title = panel.querySelector(".title")?.textContent || panel.querySelector("select")?.selectedOptions[0]?.textContent || "";
    if (!traces.length) {
      if (plot.data) Plotly.purge(plot);
      const note = make("p", "absent", why ?? (state.off.size ? "None of the methods shown has this in this setting." : "Not recorded in this setting."));
      plot.classList.add("empty");
      plot.replaceChildren(note);
      plot.setAttribute("aria-label", `${title}: ${note.textContent}`);
      return;
    }
    plot.classList.remove("empty");
    if (!plot.data) plot.replaceChildren();
    frame.width = state.print ? (panel.closest(".small") ? 325 : 670) : plot.clientWidth;
    frame.height = state.print ? (panel.closest(".small") ? 165 : panel.dataset.figure === "curve" ? 235 : 380) : plot.clientHeight;
    plot.setAttribute("aria-label", `${title}. ${said.join("; ")}.`);
    for (const trace of traces) trace.showlegend = trace.meta.part === "mean";
    Plotly.react(plot, traces, frame, {
      modeBarButtons: [["toImage"]],
      displaylogo: false,
      toImageButtonOptions: { format: "svg", filename: panel.dataset.metric || panel.dataset.figure },
      responsive: false,
      showTips: false,
    });
  }
  const panels = all("figure[data-figure]");
  // small panels of methods that do not run in this setting would be empty frames
  function relevant(panel) {
    const optional = panel.closest("[data-own]");
    if (!optional) return true;
    const any = data.methods.some((method) => data.curves[state.setting]?.[method.key]?.[panel.dataset.metric]);
    panel.hidden = !any;
    return any;
  }
  function redraw() {
    for (const panel of panels) if (relevant(panel)) draw(panel);
    for (const group of all("[data-own]")) group.hidden = all("figure", group).every((one) => one.hidden);
  }

  // ---- controls
  // the first figure shows how the chosen outcome came about
  function follow() {
    const panel = document.querySelector("figure[data-first][data-metric]"), metric = data.outcomes[state.outcome]?.curve;
    if (!panel || !metric) return;
    panel.dataset.metric = metric;
    panel.querySelector(".title").textContent = data.metrics[metric]?.title ?? metric;
  }
  function select() {
    for (const one of all("[data-setting]")) one.hidden = one.dataset.setting !== state.setting || (one.dataset.outcome !== undefined && one.dataset.outcome !== state.outcome);
    for (const one of all(".chip")) one.hidden = !data.curves[state.setting]?.[one.dataset.method];
  }
  const listen = (id, event, act) => by(id)?.addEventListener(event, act);
  listen("setting", "change", (event) => { state.setting = event.target.value; select(); redraw(); });
  listen("outcome", "change", (event) => { state.outcome = event.target.value; follow(); select(); redraw(); });
  listen("axis", "change", (event) => { state.axis = event.target.value; redraw(); });
  listen("seeds", "change", (event) => { state.seeds = event.target.checked; redraw(); });
  listen("band", "change", (event) => { state.band = event.target.value; redraw(); });
  listen("smooth", "change", (event) => { state.smooth = Number(event.target.value); redraw(); });
  root.addEventListener("painted", redraw);
  for (const chip of all(".chip"))
    chip.addEventListener("click", (event) => {
      const key = chip.dataset.method, others = data.methods.filter((one) => one.key !== key);
      if (event.shiftKey) { // this one alone, or all again
        const alone = others.every((one) => state.off.has(one.key)) && !state.off.has(key);
        state.off = new Set(alone ? [] : others.map((one) => one.key));
      } else if (!state.off.delete(key)) state.off.add(key);
      for (const one of all(".chip")) one.setAttribute("aria-pressed", String(!state.off.has(one.dataset.method)));
      redraw();
    });
  for (const choice of all("select[data-for-metric]"))
    choice.addEventListener("change", () => { const panel = choice.closest("figure"); panel.dataset.metric = choice.value; draw(panel); });
  for (const button of all("[data-copy]"))
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
      by("status").textContent = "Copied.";
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });

  // ---- paper: light, figures at full width
  window.addEventListener("beforeprint", () => { state.print = true; paint("light"); });
  window.addEventListener("afterprint", () => { state.print = false; repaint(); });
  let waiting;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { if (!state.print) redraw(); }, 120); });

  state.outcome = by("outcome")?.value ?? Object.keys(data.outcomes)[0] ?? null;
  const chosen = by("setting");
  if (chosen) state.setting = chosen.value; // a browser keeps the choice over a reload
  state.axis = by("axis")?.value ?? "rollout";
  follow();
  select();
  redraw();
  root.dataset.drawn = "";
})();
