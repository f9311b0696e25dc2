// Small charts in SVG, drawn at the width they have and redrawn when it changes.

function chart(draw) {
  const element = h("div", { class: "chart" });
  let width = 0;
  const redraw = () => {
    const now = Math.floor(element.clientWidth);
    if (now > 0 && now !== width) { width = now; element.replaceChildren(draw(width)); }
  };
  new ResizeObserver(redraw).observe(element);
  return element;
}

// Round places on an axis, with labels that all have the digits of the step.
function ticks(low, high, wanted, smallest = 0) {
  const rough = Math.max((high - low || 1) / Math.max(1, wanted), smallest);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const label = (v) => (v === 0 ? "0" : step >= 1e4 || step < 1e-3 ? short(v) : step >= 1 ? whole(v).replace("-", MINUS) : fixed(v, digits));
  const result = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-6; k++) {
    const at = Number((k * step).toPrecision(12));
    result.push({ at, label: label(at) });
  }
  return result;
}
const roomFor = (marks) => 14 + 6.6 * Math.max(1, ...marks.map((mark) => mark.label.length));

const line = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// series: [{ name, colour, dash, points: [[x, y], ...] }]
function lineChart(series, { label, unit = "", range = null }) {
  const readout = h("div", { class: "readout", "aria-hidden": "true" });
  const all = series.flatMap((s) => s.points);
  const [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  const values = all.map((p) => p[1]).sort((a, b) => a - b);
  let [y0, y1] = range || [values[0], values[values.length - 1]];
  if (!range) {
    const pad = y1 - y0 < 1e-12 ? 0.5 * (Math.abs(y0) || 1) : 0.05 * (y1 - y0);
    [y0, y1] = [y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad, y1 + pad];
  }

  const canvas = chart((width) => {
    const marks = ticks(y0, y1, 4);
    const [left, right, top, bottom, height] = [roomFor(marks), 10, unit ? 24 : 8, 40, 240];
    const x = (v) => left + ((v - x0) / (x1 - x0 || 1)) * (width - left - right);
    const y = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
    const root = svg("svg", { width, height, role: "img", "aria-label": `${label} by step${unit ? `, ${unit}` : ""}: ${series.map((s) => `${s.name} ends at ${short(s.points[s.points.length - 1][1])}`).join("; ").slice(0, 900)}` });
    for (const { at: v, label: text } of marks) root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(v), y2: y(v) }), svg("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, text));
    for (const { at: v, label: text } of ticks(x0, x1, Math.max(2, width / 70))) root.append(svg("text", { x: x(v), y: height - 22, "text-anchor": x(v) > width - 24 ? "end" : "middle" }, text));
    root.append(svg("text", { class: "axis-name", x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "step"));
    if (unit) root.append(svg("text", { class: "axis-name", x: 0, y: 11 }, unit));
    for (const s of series) {
      const points = s.points.map(([a, b]) => [x(a), y(b)]);
      root.append(svg("path", { class: `series s${seriesClass(s.colour)}`, "stroke-dasharray": DASHES[s.dash % DASHES.length], d: line(points), opacity: series.length > 4 ? 0.8 : 1 }));
    }
    const cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: top, y2: height - bottom, visibility: "hidden" });
    root.append(cursor);
    root.addEventListener("pointermove", (event) => {
      const at = x0 + ((event.clientX - root.getBoundingClientRect().left - left) / (width - left - right)) * (x1 - x0);
      const near = (s) => s.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
      const step = near(series[0])[0];
      cursor.setAttribute("x1", x(step));
      cursor.setAttribute("x2", x(step));
      cursor.setAttribute("visibility", "visible");
      readout.textContent = `step ${short(step)}: ` + series.slice(0, 8).map((s) => `${s.name} ${short(near(s)[1])}`).join(" · ");
    });
    root.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); readout.textContent = ""; });
    return root;
  });
  return h("div", { class: "card" }, h("h3", {}, label), canvas, readout);
}

function histogram(data, threshold) {
  const { edges, kept, dropped } = data;
  const most = Math.max(1, ...kept.map((k, i) => k + dropped[i]));
  return chart((width) => {
    const marks = ticks(0, most, 4, 1);
    const [left, right, top, bottom, height] = [roomFor(marks), 10, 30, 38, 260];
    const [x0, x1] = [edges[0], edges[edges.length - 1]];
    const x = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
    const y = (v) => height - bottom - (v / most) * (height - top - bottom);
    const total = kept.reduce((a, b) => a + b, 0);
    const root = svg("svg", { width, height, role: "img", "aria-label": `Distribution of the excess of ${whole(total + dropped.reduce((a, b) => a + b, 0))} mapped tokens, ${whole(total)} of them kept` });
    for (const { at: v, label: text } of marks) root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(v), y2: y(v) }), svg("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, text));
    kept.forEach((k, i) => {
      const [a, b] = [x(edges[i]) + 0.5, x(edges[i + 1]) - 0.5];
      if (dropped[i]) root.append(svg("rect", { class: "bar-dropped", x: a, width: Math.max(0.5, b - a), y: y(dropped[i]), height: y(0) - y(dropped[i]) }));
      if (k) root.append(svg("rect", { class: "bar-kept", x: a, width: Math.max(0.5, b - a), y: y(dropped[i] + k), height: y(dropped[i]) - y(dropped[i] + k) }));
    });
    for (const { at: v, label: text } of ticks(x0, x1, Math.max(3, width / 90))) root.append(svg("text", { x: x(v), y: height - 20, "text-anchor": "middle" }, text));
    root.append(svg("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, "excess: student loss − teacher loss, nats"));
    if (isNumber(threshold) && threshold >= x0 && threshold <= x1) {
      const side = x(threshold) > width * 0.6 ? "end" : "start";
      root.append(
        svg("line", { class: "threshold", x1: x(threshold), x2: x(threshold), y1: top - 14, y2: y(0) }),
        svg("text", { class: "threshold-label", x: x(threshold) + (side === "end" ? -6 : 6), y: top - 8, "text-anchor": side }, `kept from ${fixed(threshold)}`),
      );
    }
    return root;
  });
}

// One row per group: every seed a dot, the mean a bar; so the spread is seen, not told.
function dotPlot(measure, groups, at) {
  const values = groups.flatMap((g) => g.values[at].filter(isNumber));
  let [x0, x1] = [Math.min(...values), Math.max(...values)];
  const pad = 0.12 * (x1 - x0 || Math.abs(x0) || 1);
  [x0, x1] = [x0 - pad, x1 + pad];
  const plot = chart((width) => {
    const told = groups.map((group) => summary(group, at, measure));
    const label = Math.min(0.5 * width, 18 + 6.6 * Math.max(...groups.map((g) => g.name.length), ...told.map((t) => t.length)));
    const room = Math.floor(label / 7);
    const [top, step, bottom] = [6, 42, 24];
    const height = top + step * groups.length + bottom;
    const x = (v) => label + ((v - x0) / (x1 - x0)) * (width - label - 14);
    const root = svg("svg", { width, height, role: "img", "aria-label": `${measure.name} by setting, one dot per seed: ${groups.map((g, i) => `${g.name} ${told[i]}`).join("; ").slice(0, 900)}` });
    for (const { at: v, label: text } of ticks(x0, x1, Math.max(2, (width - label) / 90))) root.append(svg("line", { class: "axis", x1: x(v), x2: x(v), y1: top, y2: height - bottom }), svg("text", { x: x(v), y: height - 6, "text-anchor": "middle" }, text));
    groups.forEach((group, row) => {
      const y = top + step * (row + 0.5);
      const known = group.values[at].filter(isNumber);
      const name = group.name.length > room ? group.name.slice(0, room - 1) + "…" : group.name;
      root.append(svg("text", { class: "name", x: 0, y: y - 3 }, name, svg("title", {}, group.name)));
      root.append(svg("text", { class: "told", x: 0, y: y + 12 }, told[row]));
      for (const v of known) root.append(svg("circle", { class: `f${seriesClass(row)}`, cx: x(v), cy: y, r: 5, opacity: 0.72 }));
      if (known.length > 1) { const m = mean(known); root.append(svg("line", { class: "mean", x1: x(m), x2: x(m), y1: y - 11, y2: y + 11 })); }
    });
    return root;
  });
  const arrow = measure.better === "lower" ? "lower is better" : "higher is better";
  return h("div", { class: "card" }, h("h3", {}, measure.name), h("p", { class: "small" }, [measure.unit, arrow].filter(Boolean).join(" · ")), plot);
}

// Mean ± deviation over seeds, or with one seed ± the standard error over questions.
const seedsOf = (group) => Math.max(0, ...group.values.map((values) => values.filter(isNumber).length));
function plusMinus(group, at) {
  const values = group.values[at].filter(isNumber);
  if (values.length > 1) return deviation(values);
  const error = group.errors?.[at]?.find(isNumber);
  return values.length && isNumber(error) ? error : null;
}
function summary(group, at, { digits = 2 }) {
  const values = group.values[at].filter(isNumber);
  if (!values.length) return "not measured";
  const s = plusMinus(group, at);
  return `${fixed(mean(values), digits)}${s === null ? "" : ` ± ${fixed(s, digits)}`}, n = ${values.length}`;
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
function deviation(values) {
  if (values.length < 2) return null;
  const m = mean(values);
  return Math.sqrt(values.reduce((a, b) => a + (b - m) ** 2, 0) / (values.length - 1));
}
