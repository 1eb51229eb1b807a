(async () => {
  // gzip in base64, as `packed` in render.py writes it; a script runs by its digest in the head of the page
  const unpacked = (id) => {
    const bytes = Uint8Array.from(atob(by(id).textContent), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  document.head.append(make("script", "", await unpacked("plotly")));
  const data = JSON.parse(await unpacked("data"));
  const state = { setting: data.settings[0].key, outcome: Object.keys(data.outcomes)[0], seeds: false, off: new Set(), print: false };
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

  // ---- figures
  const shown = () => data.methods.filter((one) => !state.off.has(one.key));
  const lineOf = (method) => ({ color: variable(`--m${method.colour}`), width: method.colour ? 2 : 2.4, dash: DASHES[method.dash] });
  const seriesOf = (metric, method) => data.curves[state.setting]?.[method.key]?.[metric];
  function layout(x, y) {
    const axis = { tickformat: "~g", gridcolor: variable("--grid"), linecolor: variable("--faint"), zeroline: false, ticks: "outside", ticklen: 4, tickcolor: variable("--faint") };
    return {
      font: { family: sans, size: 12, color: variable("--soft") },
      paper_bgcolor: variable("--paper"), plot_bgcolor: variable("--paper"),
      margin: { l: 46, r: 16, t: 10, b: state.print ? 64 : 42 }, showlegend: state.print, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" }, hovermode: "x unified", dragmode: "zoom",
      hoverlabel: { bgcolor: variable("--raised"), bordercolor: variable("--faint"), font: { color: variable("--ink"), family: sans, size: 12 }, namelength: 40 },
      xaxis: { ...axis, showgrid: false, showline: true, ...x }, yaxis: { ...axis, automargin: "left", ...y },
    };
  }
  function curve(panel) {
    const { metric } = panel.dataset, traces = [];
    for (const method of shown()) {
      const series = seriesOf(metric, method);
      if (!series) continue;
      const grid = series.x ?? data.grids[series.grid], name = plain(method.name), line = lineOf(method);
      const means = grid.map((_, index) => index).filter((index) => series.mean[index] !== null);
      const x = means.map((index) => grid[index]), y = means.map((index) => series.mean[index]);
      // a share of runs stays until the next one is lost
      if (series.x) line.shape = "hv";
      // where runs end in two clusters, no run ends near their mean: the lost ones are drawn alone
      if (series.seeds.length > 1 && (state.seeds || series.lost.includes(true) || !means.length))
        series.seeds.forEach((values, index) => {
          const [alpha, dash] = series.lost[index] ? [0.75, "dot"] : [0.38, "solid"];
          traces.push({ x: grid, y: values, mode: means.length ? "lines" : "lines+markers", marker: { size: 4 }, line: { color: faded(line.color, alpha), width: 1, dash }, hoverinfo: "skip", name: `${name} seed ${plain(series.names[index])}`, meta: { method: method.key, part: "seed" } });
        });
      else {
        const end = (values) => ({ x, y: means.map((index) => values[index] ?? series.mean[index]), mode: "lines", line: { ...line, width: 0 }, hoverinfo: "skip" });
        traces.push({ ...end(series.low), meta: { method: method.key, part: "low" } });
        traces.push({ ...end(series.high), fill: "tonexty", fillcolor: faded(line.color, 0.13), meta: { method: method.key, part: "band" } });
      }
      if (means.length) traces.push({ x, y, mode: metric.startsWith("eval/") ? "lines+markers" : "lines", line, marker: { size: 6, symbol: SYMBOLS[method.marker] }, name, hovertemplate: "%{y:.4~g}", meta: { method: method.key, part: "mean" } });
    }
    const end = Math.max(...traces.flatMap((trace) => trace.x));
    const y = panel.dataset.log !== undefined ? { type: "log" } : { rangemode: data.metrics[metric].zero && !panel.closest(".first") ? "tozero" : "normal" };
    if (panel.closest(".small")) y.nticks = 5;
    return [traces, layout({ title: { text: "rollout", standoff: 6 }, range: [0, 1.015 * end], unifiedhovertitle: { text: "rollout %{x}" }, spikecolor: variable("--soft"), spikethickness: 1, spikedash: "solid" }, y)];
  }
  function sweep(panel) {
    const one = data.sweeps[Number(panel.dataset.sweep)], traces = [], outcome = data.outcomes[state.outcome]?.title ?? "";
    panel.querySelector(".title").textContent = `${outcome} against ${one.key}`;
    const many = shown().filter((method) => one.methods[method.key]);
    many.forEach((method, index) => {
      const points = one.methods[method.key], values = points.outcomes[state.outcome] ?? [], line = lineOf(method);
      // methods side by side, so that their points do not cover each other
      const shift = index - (many.length - 1) / 2;
      const x = points.x.map((value) => (one.log ? value * 1.012 ** shift : value + (shift * (one.values.at(-1) - one.values[0])) / 150));
      const y = values.map((seeds) => (seeds.length ? (seeds[(seeds.length - 1) >> 1] + seeds[seeds.length >> 1]) / 2 : null));
      if (y.every((value) => value === null)) return;
      traces.push({
        x, y, mode: "lines+markers", line, name: plain(method.name),
        customdata: points.x.map((value, i) => [plain(one.labels[one.values.indexOf(value)]), plain(points.collapsed[i])]),
        marker: { size: 7, symbol: points.stable.map((good) => (good ? SYMBOLS[method.marker] : `${SYMBOLS[method.marker]}-open`)), line: { width: 1.6, color: line.color } },
        hovertemplate: "%{customdata[0]}: %{y:.3~g}<br>lost %{customdata[1]}", meta: { method: method.key, part: "mean" },
      });
      const each = values.flatMap((seeds, i) => seeds.map((value) => [x[i], value]));
      traces.push({ x: each.map(([value]) => value), y: each.map(([, value]) => value), mode: "markers", marker: { size: 4, color: faded(line.color, 0.6) }, hoverinfo: "skip", meta: { method: method.key, part: "seed" } });
      const top = points.x.indexOf(points.highest);
      if (top >= 0 && y[top] !== null) traces.push({ x: [x[top]], y: [y[top]], mode: "markers", marker: { size: 18, symbol: "circle-open", color: line.color, line: { width: 2 } }, hoverinfo: "skip", meta: { method: method.key, part: "highest" } });
    });
    const ticks = { tickvals: one.values, ticktext: one.labels.map(plain) };
    return [traces, { ...layout({ type: one.log ? "log" : "linear", title: { text: plain(one.key), standoff: 6 }, ...ticks }, { rangemode: "tozero", title: { text: plain(outcome), standoff: 8 } }), hovermode: "closest" }];
  }
  function draw(panel) {
    const plot = panel.querySelector(".plot"), heading = panel.querySelector(".title, option:checked").textContent;
    const [traces, frame] = { curve, sweep }[panel.dataset.figure](panel);
    const ends = traces.filter((trace) => trace.meta.part === "mean").map((trace) => `${data.methods.find((one) => one.key === trace.meta.method).name} ends at ${number(trace.y.at(-1))}`);
    const absent = state.off.size ? "None of the methods shown has this in this setting." : "Not recorded in this setting.";
    plot.setAttribute("aria-label", `${heading}. ${traces.length ? `${ends.join("; ")}.` : absent}`);
    plot.classList.toggle("empty", !traces.length);
    if (!plot.data || !traces.length) {
      if (plot.data) Plotly.purge(plot);
      plot.replaceChildren(...(traces.length ? [] : [make("p", "absent", absent)]));
    }
    if (!traces.length) return;
    if (state.print) Object.assign(frame, panel.closest(".small") ? { width: 325, height: 165 } : { width: 670, height: panel.dataset.figure === "curve" ? 235 : 380 });
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
      panel.hidden = panel.closest("[data-own]") && !data.methods.some((method) => seriesOf(panel.dataset.metric, method));
      if (!panel.hidden) draw(panel);
    }
    for (const group of all("[data-own]")) group.hidden = all("figure", group).every((one) => one.hidden);
  }

  // ---- controls
  function choose() {
    for (const id of ["setting", "outcome"]) state[id] = by(id)?.value ?? state[id];
    state.seeds = Boolean(by("seeds")?.checked);
    // the first figure shows how the chosen outcome came about
    const panel = document.querySelector(".first [data-figure='curve']"), metric = data.outcomes[state.outcome]?.curve;
    if (panel && metric) {
      panel.dataset.metric = metric;
      panel.querySelector(".title").textContent = data.metrics[metric]?.title ?? metric;
    }
    for (const one of all("[data-setting]")) one.hidden = one.dataset.setting !== state.setting || ![undefined, state.outcome].includes(one.dataset.outcome);
    for (const one of all(".chip")) one.hidden = !data.curves[state.setting]?.[one.dataset.method];
    redraw();
  }
  for (const id of ["setting", "outcome", "seeds"]) by(id)?.addEventListener("change", choose);
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

  // ---- the theme is the browser's; on paper it is light, with figures at full width
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const [name, scheme] of [["beforeprint", "light"], ["afterprint", ""]])
    window.addEventListener(name, () => {
      state.print = name === "beforeprint";
      root.style.colorScheme = scheme;
      redraw();
    });

  choose();
  root.dataset.drawn = "";
})();
