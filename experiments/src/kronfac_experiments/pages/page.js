"use strict";
(() => {
  const data = JSON.parse(document.getElementById("plot-data").textContent);
  const AXES = {
    iteration: { title: "iterations", format: ",~g" },
    cases: { title: "training cases seen", format: "~s" },
    seconds: { title: "optimizer time, seconds", format: ",~g" },
  };
  const ERRORS = {
    train_error: { label: "training error", dash: "solid" },
    test_error: { label: "test error", dash: "dash" },
    averaged_train_error: { label: "averaged training error", dash: "dot" },
    averaged_test_error: { label: "averaged test error", dash: "dashdot" },
  };
  const NAMES = { lambda: "λ", gamma: "γ", alpha: "α", mu: "μ", rho: "ρ", loss: "loss", batch: "cases" };
  const RHO_SHOWN = [-1, 3];
  // A colour comes back after seven parts, then with another pattern.
  const PART_COLOURS = [0, 1, 2, 3, 5, 6, 4];
  const PATTERNS = ["", "/", "", "x", "", "\\", ".", "-", "|", "+", "/", "x", ".", ""];
  const touch = window.matchMedia("(pointer: coarse)").matches;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // plotly reads a little HTML in every text: names are to be shown as they are.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const number = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
  const brief = (value) =>
    value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7) ? value.toExponential(2) : number(value);
  const pressed = (control) =>
    [...document.querySelectorAll(`button[data-control="${control}"][aria-pressed="true"]`)].map(
      (button) => button.dataset.value,
    );

  // The pressed buttons are the state.
  function choices() {
    const one = (control, otherwise) => pressed(control)[0] ?? otherwise;
    const chips = document.querySelector('button[data-control="run"]') !== null;
    const shown = new Set(pressed("run").map(Number));
    return {
      x: one("x", "iteration"),
      xScale: one("x-scale", "linear"),
      yScale: one("y-scale", "log"),
      quantities: document.querySelector('button[data-control="quantity"]') ? pressed("quantity") : ["train_error"],
      runs: data.runs.filter((_, index) => !chips || shown.has(index)),
    };
  }

  function axis(title, type, more) {
    return {
      title: { text: title, standoff: 8, font: { size: 13 } },
      type,
      automargin: true,
      gridcolor: css("--grid"),
      linecolor: css("--line"),
      zerolinecolor: css("--line"),
      ticks: "outside",
      tickcolor: css("--line"),
      tickfont: { size: 12 },
      tickformat: ",~g",
      nticks: 8,
      ...more,
    };
  }

  const xAxis = (chosen, more) =>
    axis(AXES[chosen.x].title, chosen.xScale, { tickformat: AXES[chosen.x].format, rangemode: "nonnegative", ...more });

  function layout(x, y, more) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--text") },
      margin: { l: 48, r: 12, t: 12, b: 44 },
      showlegend: false,
      hovermode: "closest",
      hoverlabel: {
        bgcolor: css("--panel"),
        bordercolor: css("--line"),
        font: { color: css("--text"), size: 13 },
        align: "left",
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--text") },
      // A finger that drags wants to scroll the page.
      dragmode: touch ? false : "zoom",
      xaxis: x,
      yaxis: y,
      ...more,
    };
  }

  const config = (modeBar) => ({
    responsive: true,
    displaylogo: false,
    displayModeBar: modeBar && !touch ? "hover" : false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  });

  function hover(run, label, series, row) {
    const where = [`iteration ${series.iteration[row].toLocaleString("en")}`];
    if (series.cases) where.push(`${series.cases[row].toLocaleString("en")} cases`);
    if (series.seconds) where.push(`${brief(series.seconds[row])} s`);
    return `<b>${plain(run.name)}</b><br>${label} ${brief(series.value[row])}<br>${where.join(" · ")}`;
  }

  function curve(run, label, series, x, style) {
    const thinLine = style.width < 2;
    return {
      type: "scatter",
      mode: series.value.length === 1 ? "markers" : "lines+markers",
      name: plain(run.name),
      x: series[x],
      y: style.clip ? series.value.map((v) => Math.min(Math.max(v, style.clip[0]), style.clip[1])) : series.value,
      text: series.value.map((_, row) => hover(run, label, series, row)),
      hovertemplate: "%{text}<extra></extra>",
      line: { color: css(run.colour), dash: style.dash, width: style.width },
      marker: { color: css(run.colour), symbol: run.symbol, size: thinLine ? 7 : 9, maxdisplayed: style.markers },
    };
  }

  // A page with runs on several problems has a plot for each group of them.
  function drawErrors(plot, chosen) {
    const curves = [];
    for (const run of chosen.runs.filter((run) => (run.group ?? "") === plot.dataset.errors)) {
      for (const name of chosen.quantities) {
        const series = run.errors[name];
        if (!series || !series[chosen.x]) continue;
        const { label, dash } = ERRORS[name];
        curves.push(curve(run, label, series, chosen.x, { dash, width: 2, markers: 10 }));
      }
    }
    const title = chosen.quantities.length === 1 ? ERRORS[chosen.quantities[0]].label : "error";
    const view = [chosen.x, chosen.xScale, chosen.yScale].join();
    Plotly.react(
      plot,
      curves,
      layout(xAxis(chosen), axis(title, chosen.yScale), { uirevision: view }),
      config(true),
    );
  }

  function drawTrace(plot, chosen) {
    const name = plot.dataset.trace;
    const clip = name === "rho" ? RHO_SHOWN : undefined;
    const having = chosen.runs.filter((run) => run.traces[name] && run.traces[name][chosen.x]);
    const curves = having.map((run) =>
      curve(run, NAMES[name], run.traces[name], chosen.x, { width: 1.5, markers: 6, clip }),
    );
    const values = having.flatMap((run) => run.traces[name].value);
    const log = plot.dataset.scale === "log" && values.every((value) => value > 0);
    // On so small a plot, 1, 2, …, 9 do not fit into a decade.
    const decades = log ? Math.log10(Math.max(...values) / Math.min(...values)) : 0;
    const ticks = decades > 0.7 && decades < 2.2 ? { dtick: "D2" } : { nticks: 4 };
    const level = (y) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y,
      line: { color: css("--muted"), width: 1, dash: "dot" },
    });
    Plotly.react(
      plot,
      curves,
      layout(
        xAxis(chosen, { nticks: 5 }),
        axis("", log ? "log" : "linear", ticks),
        { shapes: name === "rho" ? [level(0.25), level(0.75)] : [], uirevision: chosen.x + chosen.xScale },
      ),
      config(false),
    );
  }

  function drawTime(chosen) {
    const plot = document.getElementById("time-plot");
    if (!plot) return;
    const timed = chosen.runs.filter((run) => Object.keys(run.parts).length);
    const parts = [...new Set(data.runs.flatMap((run) => Object.keys(run.parts)))];
    const total = (run) => Object.values(run.parts).reduce((sum, time) => sum + time, 0);
    const rows = timed.map((_, row) => row);
    const colour = (place) => css(`--colour-${PART_COLOURS[place % PART_COLOURS.length]}`);
    const bars = parts.map((part, place) => ({
      type: "bar",
      orientation: "h",
      name: plain(part.replaceAll("_", " ")),
      width: 0.45,
      y: rows,
      x: timed.map((run) => run.parts[part] ?? 0),
      text: timed.map((run) => {
        const time = run.parts[part] ?? 0;
        const share = total(run) ? Math.round((100 * time) / total(run)) : 0;
        return `<b>${plain(run.name)}</b><br>${plain(part.replaceAll("_", " "))}: ${brief(time)} ms, ${share} %`;
      }),
      textposition: "none",
      hovertemplate: "%{text}<extra></extra>",
      marker: {
        color: colour(place),
        line: { color: css("--panel"), width: 1 },
        pattern: {
          shape: PATTERNS[place % PATTERNS.length],
          bgcolor: colour(place),
          fgcolor: css("--panel"),
          size: 7,
          solidity: 0.15,
        },
      },
    }));
    const names = timed.map((run, row) => ({
      x: 0, y: row, yshift: 24, xanchor: "left", showarrow: false, align: "left",
      text: `<b>${plain(run.name)}</b>  ${brief(total(run))} ms`,
    }));
    const legendRows = Math.ceil((140 * parts.length) / plot.clientWidth);
    plot.style.height = `${80 + 22 * legendRows + 62 * timed.length}px`;
    Plotly.react(
      plot,
      bars,
      layout(
        axis("milliseconds an iteration", "linear"),
        { visible: false, range: [timed.length - 0.5, -0.8], fixedrange: true },
        {
          barmode: "stack",
          showlegend: true,
          legend: { orientation: "h", traceorder: "normal", y: 1, yanchor: "bottom", x: 0 },
          annotations: names,
          margin: { l: 12, r: 12, t: 12, b: 44 },
        },
      ),
      config(false),
    );
  }

  function draw() {
    const chosen = choices();
    for (const plot of document.querySelectorAll(".plot[data-errors]")) drawErrors(plot, chosen);
    for (const plot of document.querySelectorAll(".plot[data-trace]")) drawTrace(plot, chosen);
    drawTime(chosen);
  }

  for (const button of document.querySelectorAll("button[data-control]")) {
    button.addEventListener("click", () => {
      const group = button.closest(".group");
      if (group.dataset.kind === "one") {
        for (const other of group.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
      } else {
        button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      }
      draw();
    });
  }

  const onlyDifferences = document.getElementById("only-differences");
  onlyDifferences?.addEventListener("click", () => {
    const on = onlyDifferences.getAttribute("aria-pressed") !== "true";
    onlyDifferences.setAttribute("aria-pressed", String(on));
    document.getElementById("configuration-table").classList.toggle("only-differences", on);
  });

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
