// Draws the pictures that the page carries as data. Colours and fonts are the style sheet's, so that light and dark need
// no second copy here: when the reader's setting changes, everything is drawn again.
(() => {
  const pictures = JSON.parse(document.getElementById("chart-data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const touch = matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page and must not zoom
  const LEVELS = ["solid", "dash"];

  function trace(one, picture) {
    const shade = colour(one.role);
    const drawn = {
      name: one.name, x: one.x, y: one.y,
      hovertext: one.text.length ? one.text : undefined,
      hoverinfo: one.text.length ? "text" : "none",
    };
    if (one.kind === "bars") {
      const edge = picture.key === "step" ? 0 : 0.5;
      return {
        ...drawn, type: "bar", orientation: picture.across ? "h" : "v", base: one.base.length ? one.base : undefined,
        marker: { color: shade, line: { color: colour("card"), width: edge } },
        text: one.label.length ? one.label : undefined, textposition: one.label.length ? "outside" : "none",
        cliponaxis: false, textfont: { color: colour("ink") },
      };
    }
    if (one.kind === "intervals") {
      const away = { array: one.high.map((end, i) => end - one.x[i]), arrayminus: one.low.map((end, i) => one.x[i] - end) };
      return { ...drawn, type: "scatter", mode: "markers", marker: { color: shade, size: 4 },
        error_x: { type: "data", symmetric: false, ...away, color: shade, thickness: 1.25, width: 4 } };
    }
    const line = { color: shade, width: one.kind === "area" ? 0.5 : 1.75, shape: one.kind === "line" ? "linear" : "hv" };
    if (one.kind === "area") {
      const sum = "%{y:.2f} GB";
      return { ...drawn, type: "scatter", mode: "lines", stackgroup: "all", line, fillcolor: shade,
        hoverinfo: undefined, hovertemplate: `${one.name}: ${sum}<extra></extra>` };
    }
    const points = one.kind === "points";
    const mode = points ? "markers" : one.kind === "line" ? "lines+markers" : "lines";
    const big = one.role === "named";
    return {
      ...drawn, type: "scatter", mode: one.label.length ? `${mode}+text` : mode, line,
      text: one.label.length ? one.label : undefined, textposition: big ? "top right" : "bottom right",
      textfont: { size: 12, color: colour("ink") }, cliponaxis: false,
      marker: { color: shade, size: big ? 9 : 6, symbol: big ? "diamond" : "circle", line: { color: colour("card"), width: 1 } },
    };
  }

  function level(one, at) {
    const line = { color: colour("level"), width: 1.5, dash: LEVELS[at] };
    return one.upright
      ? { type: "line", layer: "above", yref: "paper", y0: 0, y1: 1, x0: one.value, x1: one.value, line }
      : { type: "line", layer: "above", xref: "paper", x0: 0, x1: 1, y0: one.value, y1: one.value, line };
  }

  // Of a long list: Math.min takes no more arguments than the stack holds.
  const ends = (values) => values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);

  // Where the numbers of an axis end; bars on each other add up, so that there plotly finds out.
  function bounds(picture, axis) {
    const upright = axis === "x";
    const bars = picture.traces[0].kind === "bars" || picture.traces[0].kind === "area";
    const levels = picture.levels.filter((one) => one.upright === upright).map((one) => one.value);
    if (bars) return undefined;
    const [low, high] = ends([...picture.traces.flatMap((one) => one[axis]), ...levels]);
    const zero = upright ? picture.x_from_zero : picture.from_zero;
    const start = zero ? Math.min(0, low) : low;
    const room = (high - start || Math.abs(high) || 1) * (upright && picture.key === "over" ? 0 : 0.06);
    return [zero && start === 0 ? 0 : start - room, high + room];
  }

  function layout(picture) {
    const soft = { color: colour("soft"), size: 12 };
    const axis = {
      gridcolor: colour("grid"), linecolor: colour("rule"), zeroline: false, tickfont: soft, fixedrange: touch, nticks: 8,
      automargin: true,
    };
    const named = { ...axis, type: "category", showgrid: false, tickfont: { color: colour("ink"), size: 12 } };
    const title = (text) => (text ? { text, font: soft, standoff: 8 } : undefined);
    const names = picture.names;
    const ups = picture.traces[0].kind === "bars" && !picture.across;
    const few = { tickmode: names.length > 40 ? "auto" : "linear", nticks: 40 };
    const lowest = picture.key === "otherwise" ? ends(picture.traces.flatMap((one) => one.x)) : null;
    const around = lowest && [Math.min(0, lowest[0]) * 1.25 - 1, Math.max(0, lowest[1]) * 1.25 + 1];
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
      margin: { l: 10, r: 16, t: 8, b: 40 },
      showlegend: false, hovermode: picture.key === "peak" ? "x unified" : "closest",
      dragmode: touch ? false : "zoom",
      barmode: picture.key === "step" ? "overlay" : picture.key === "otherwise" ? "relative" : "stack",
      bargap: picture.key === "step" ? 0.12 : names.length < 3 ? 0.5 : 0.28,
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("rule"), font: { color: colour("ink"), size: 13 }, align: "left" },
      xaxis: ups
        ? { ...named, tickmode: "linear", dtick: Math.ceil(names.length / 16), tickangle: 0, categoryarray: names, categoryorder: "array", title: title(picture.x_title) }
        : { ...axis, showgrid: picture.across, showline: true, range: around || bounds(picture, "x"),
          zeroline: picture.key === "otherwise", zerolinecolor: colour("soft"), hoverformat: ".4~g",
          rangemode: picture.x_from_zero || picture.across ? "tozero" : "normal", title: title(picture.x_title) },
      yaxis: picture.across
        ? { ...named, ...few, categoryarray: names, categoryorder: "array", autorange: "reversed", ticklabelstandoff: 6 }
        : { ...axis, range: bounds(picture, "y"), rangemode: "tozero", title: title(picture.y_title) },
      shapes: picture.levels.map(level),
    };
  }

  function draw() {
    for (const picture of pictures) {
      Plotly.react(`plot-${picture.key}`, picture.traces.map((one) => trace(one, picture)), layout(picture),
        { displayModeBar: false, responsive: true });
    }
  }

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
