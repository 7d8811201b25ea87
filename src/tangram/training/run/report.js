// Draws the charts that the page carries as data. Colours and fonts are the style sheet's, so that light and dark need
// no second copy here: when the reader's setting changes, everything is drawn again.
(() => {
  const { charts, axes, again } = JSON.parse(document.getElementById("chart-data").textContent);
  const at = new Map((axes.steps || []).map((step, place) => [step, place]));
  // The choice stands in the address, so that a page that is read anew keeps it.
  const chosen = () => (axes[location.hash.slice(1)] ? location.hash.slice(1) : "step");
  const over = (x) => (chosen() === "step" ? x : axes[chosen()].at[at.get(x)]);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const touch = matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page and must not zoom

  function line(one, chart) {
    const alone = one.x.length === 1;
    const behind = one.role === "train" && chart.lines.some((other) => other.role === "smooth");
    const shade = one.role === "points" ? "held-out" : behind ? "raw" : "train";
    return {
      type: "scatter",
      name: one.name,
      x: one.x.map(over),
      y: one.y,
      customdata: one.more.length ? one.more : undefined,
      mode: one.role === "points" ? (alone ? "markers" : "lines+markers") : alone ? "markers" : "lines",
      line: { color: colour(shade), width: behind ? 1 : one.role === "smooth" ? 2.25 : one.role === "points" ? 1 : 1.5,
        dash: one.role === "points" ? "dot" : "solid" },
      marker: { color: colour(shade), size: 8, line: { color: colour("card"), width: 1.5 } },
      hovertemplate: `${one.name}: ${one.hover}<extra></extra>`,
    };
  }

  function marks(chart) {
    return {
      type: "scatter",
      name: "checkpoint",
      x: chart.marks.map((mark) => over(mark.x)),
      y: chart.marks.map(() => 0.025), // just above the axis
      customdata: chart.marks.map((mark) => mark.text),
      yaxis: "y2",
      mode: "markers",
      cliponaxis: false,
      marker: { symbol: "triangle-up", size: 10, color: colour("mark") },
      hovertemplate: "checkpoint: %{customdata}<extra></extra>",
    };
  }

  function level(one) {
    return {
      type: "line", layer: "above", xref: "paper", x0: 0, x1: 1, y0: one.y, y1: one.y,
      line: { color: colour("level"), width: 1.5, dash: "dash" },
    };
  }

  function bounds(chart) {
    const shown = [...chart.lines.flatMap((one) => one.y), ...chart.levels.map((one) => one.y)];
    const values = chart.log ? shown.map(Math.log10) : shown;
    const low = chart.from_zero ? Math.min(0, ...ends(values)) : Math.min(...ends(values));
    const high = Math.max(...ends(values));
    const room = (high - low || Math.abs(high) || 1) * 0.07;
    return [chart.from_zero && low === 0 ? 0 : low - room * 1.4, high + room];
  }

  // Of a long list: Math.min takes no more arguments than the stack holds.
  const ends = (values) => values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);

  function layout(chart) {
    const steps = ends(chart.lines.flatMap((one) => one.x.map(over)));
    const span = steps[1] - steps[0], by = chosen(), numbers = { step: ",d", tokens: "~s", time: "" }[by];
    const title = by === "step" ? "step" : axes[by].title;
    const axis = {
      gridcolor: colour("grid"), linecolor: colour("rule"), zeroline: false, tickfont: { color: colour("soft"), size: 12 },
      fixedrange: touch,
    };
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
      margin: { l: 34, r: 12, t: 10, b: 40 },
      showlegend: false,
      hovermode: "x unified",
      dragmode: touch ? false : "zoom",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("rule"), font: { color: colour("ink"), size: 13 } },
      xaxis: {
        ...axis, showgrid: false, showline: true, ticks: "outside", ticklen: 4, tickcolor: colour("rule"), nticks: 8,
        range: span ? [steps[0] - span * 0.012, steps[1] + span * 0.012] : [steps[0] - 1, steps[1] + 1],
        dtick: by === "step" && span < 8 ? 1 : undefined, tickformat: numbers, hoverformat: by === "time" ? ".2f" : ",d",
        unifiedhovertitle: { text: by === "step" ? "step %{x}" : `%{x} ${title}` },
        title: { text: title, font: { size: 12, color: colour("soft") }, standoff: 6 },
      },
      yaxis: { ...axis, type: chart.log ? "log" : "linear", dtick: chart.log ? "D2" : undefined, range: bounds(chart), tickformat: chart.ticks, nticks: 6, automargin: true },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: chart.levels.map(level),
    };
  }

  function draw() {
    for (const chart of charts) {
      const traces = chart.lines.map((one) => line(one, chart));
      if (chart.marks.length) traces.push(marks(chart));
      Plotly.react(`plot-${chart.key}`, traces, layout(chart), { displayModeBar: false, responsive: true });
    }
  }

  for (const choice of document.querySelectorAll("input[name=axis]")) {
    choice.checked = choice.value === chosen();
    choice.addEventListener("change", () => {
      location.hash = choice.value;
      draw();
    });
  }
  draw();
  if (again) setTimeout(() => location.reload(), again * 1000);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
