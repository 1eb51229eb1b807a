(async () => {
  // gzip in base64, as `packed` in render.py writes it; a script runs by its digest in the head of the page
  const unpacked = (id) => {
    const bytes = Uint8Array.from(atob(by(id).textContent), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  document.head.append(make("script", "", await unpacked("plotly")));
  const data = JSON.parse(await unpacked("data"));
  const state = { setting: data.settings[0].key, outcome: Object.keys(data.outcomes)[0], axis: "rollout", smooth: 1, off: new Set(), print: false };
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

  // a series of a method, smoothed, and where its points and those of each seed stand
  const moving = (values, reach) =>
    values.map((value, index) => {
      const near = values.slice(Math.max(0, index - reach), index + reach + 1).filter((one) => one !== null);
      return value === null ? null : near.reduce((sum, one) => sum + one, 0) / near.length;
    });
  function seriesOf(metric, method) {
    const series = data.curves[state.setting]?.[method.key]?.[metric], sampled = !metric.startsWith("eval/");
    const cost = series && data.costs[state.setting]?.[method.key]?.[series.grid]?.[state.axis], grid = data.grids[series?.grid];
    if (!series || (state.axis !== "rollout" && !cost)) return null;
    const smooth = (values) => (sampled && state.smooth > 1 ? moving(values, (state.smooth - 1) / 2) : values);
    const [mean, low, high] = [series.mean, series.low, series.high].map(smooth);
    return { ...series, mean, low, high, sampled, seeds: series.seeds.map(smooth), x: cost ? cost.mean : grid, own: cost ? cost.seeds : series.seeds.map(() => grid) };
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
  function curve(panel) {
    const { metric } = panel.dataset, log = panel.dataset.log !== undefined, traces = [], said = [];
    for (const method of shown()) {
      const series = seriesOf(metric, method);
      if (!series) continue;
      const name = plain(method.name), line = { color: colour(method), width: method.baseline ? 2.4 : 2, dash: DASHES[method.dash] };
      const means = series.x.map((_, index) => index).filter((index) => series.mean[index] !== null);
      // where runs end in two clusters, no run ends near their mean: the lost ones are drawn alone
      if (series.seeds.length > 1 && (state.seeds || series.lost.includes(true) || !means.length))
        series.seeds.forEach((values, index) => {
          const [alpha, dash] = series.lost[index] ? [0.75, "dot"] : [0.38, "solid"];
          traces.push({ x: series.own[index], y: values, mode: means.length ? "lines" : "lines+markers", marker: { size: 4 }, line: { color: faded(line.color, alpha), width: 1, dash }, hoverinfo: "skip", name: `${name} seed ${plain(series.names[index])}`, meta: { method: method.key, part: "seed" } });
        });
      else if (series.seeds.length > 1) {
        const back = [...means].reverse(), both = [...means, ...back].map((index) => series.x[index]);
        traces.push({ x: both, y: [...means.map((index) => series.high[index]), ...back.map((index) => series.low[index])], fill: "toself", fillcolor: faded(line.color, 0.13), line: { width: 0 }, mode: "lines", hoverinfo: "skip", meta: { method: method.key, part: "band" } });
      }
      if (!means.length) continue;
      traces.push({ x: series.x, y: series.mean, connectgaps: true, mode: series.sampled ? "lines" : "lines+markers", line, marker: { size: 6, symbol: SYMBOLS[method.marker] }, name, hovertemplate: "%{y:.4~g}", meta: { method: method.key, part: "mean" } });
      said.push(`${method.name} ends at ${number(series.mean[means.at(-1)])}`);
    }
    const { title, hover, format } = data.axes[state.axis], end = Math.max(...traces.flatMap((trace) => trace.x));
    const y = log ? { type: "log" } : { rangemode: data.metrics[metric].zero && panel.dataset.first === undefined ? "tozero" : "normal" };
    if (panel.closest(".small")) y.nticks = 5;
    return { traces, layout: layout({ title: { text: title, standoff: 6 }, range: [0, 1.015 * end], tickformat: format, unifiedhovertitle: { text: hover }, spikecolor: variable("--soft"), spikethickness: 1, spikedash: "solid" }, y), said };
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
      const y = values.map((seeds) => (seeds.length ? (seeds[(seeds.length - 1) >> 1] + seeds[seeds.length >> 1]) / 2 : null));
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

  function draw(panel) {
    const plot = panel.querySelector(".plot");
    const { traces, layout: frame, said, why } = { curve, sweep, survival }[panel.dataset.figure](panel);
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
    if (state.print) Object.assign(frame, panel.closest(".small") ? { width: 325, height: 165 } : { width: 670, height: panel.dataset.figure === "curve" ? 235 : 380 });
    plot.setAttribute("aria-label", `${title}. ${said.join("; ")}.`);
    for (const trace of traces) trace.showlegend = trace.meta.part === "mean";
    Plotly.react(plot, traces, frame, {
      modeBarButtons: [["toImage"]],
      displaylogo: false,
      toImageButtonOptions: { format: "svg", filename: panel.dataset.metric || panel.dataset.figure },
      responsive: true,
      showTips: false,
    });
  }
  const panels = all("figure[data-figure]");
  function redraw() {
    for (const panel of panels) {
      // small panels of methods that do not run in this setting would be empty frames
      panel.hidden = panel.closest("[data-own]") && !data.methods.some((method) => data.curves[state.setting]?.[method.key]?.[panel.dataset.metric]);
      if (!panel.hidden) draw(panel);
    }
    for (const group of all("[data-own]")) group.hidden = all("figure", group).every((one) => one.hidden);
  }

  // ---- controls
  function choose() {
    for (const id of ["setting", "outcome", "axis", "smooth"]) state[id] = by(id)?.value ?? state[id];
    state.seeds = Boolean(by("seeds")?.checked);
    // the first figure shows how the chosen outcome came about
    const panel = document.querySelector("figure[data-first]"), metric = data.outcomes[state.outcome]?.curve;
    if (panel && metric) {
      panel.dataset.metric = metric;
      panel.querySelector(".title").textContent = data.metrics[metric]?.title ?? metric;
    }
    for (const one of all("[data-setting]")) one.hidden = one.dataset.setting !== state.setting || ![undefined, state.outcome].includes(one.dataset.outcome);
    for (const one of all(".chip")) one.hidden = !data.curves[state.setting]?.[one.dataset.method];
    redraw();
  }
  for (const id of ["setting", "outcome", "axis", "smooth", "seeds"]) by(id)?.addEventListener("change", choose);
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

  // ---- paper: light, figures at full width
  window.addEventListener("beforeprint", () => { state.print = true; paint("light"); });
  window.addEventListener("afterprint", () => { state.print = false; repaint(); });

  choose();
  root.dataset.drawn = "";
})();
