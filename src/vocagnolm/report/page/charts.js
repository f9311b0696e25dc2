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
  const label = (v) => (v === 0 ? "0" : step >= 1e4 || step < 1e-9 ? short(v) : step >= 1 ? whole(v).replace("-", MINUS) : fixed(v, digits));
  const result = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-6; k++) {
    const at = Number((k * step).toPrecision(12));
    result.push({ at, label: label(at) });
  }
  return result;
}
const roomFor = (marks) => 14 + 6.6 * Math.max(1, ...marks.map((mark) => mark.label.length));

const line = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// Runs of one setting as one line, their mean, over a band from the lowest to the highest.
// series: [{ name, colour, points: [[x, mean, low, high], ...] }]
// `zero`: the name of what lies at zero, from which the others differ.
function lineChart(series, { label, unit, zero }) {
  const readout = h("div", { class: "readout", "aria-hidden": "true" });
  const all = series.flatMap((s) => s.points);
  const [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  const held = zero === undefined ? [] : [0];
  let [y0, y1] = [Math.min(...held, ...all.map((p) => p[2])), Math.max(...held, ...all.map((p) => p[3]))];
  const pad = y1 - y0 < 1e-12 ? 0.5 * (Math.abs(y0) || 1) : 0.05 * (y1 - y0);
  [y0, y1] = [zero === undefined && y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad, y1 + pad];

  const canvas = chart((width) => {
    const marks = ticks(y0, y1, 4);
    const [left, right, top, bottom, height] = [roomFor(marks), 10, 24, 40, 300];
    const x = (v) => left + ((v - x0) / (x1 - x0 || 1)) * (width - left - right);
    const y = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
    const root = svg("svg", { width, height, role: "img", "aria-label": `${label} by step, ${unit}: ${series.map((s) => `${s.name} ends at ${short(s.points[s.points.length - 1][1])}`).join("; ").slice(0, 900)}` });
    for (const { at: v, label: text } of marks) root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(v), y2: y(v) }), svg("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, text));
    for (const { at: v, label: text } of ticks(x0, x1, Math.max(2, width / 70))) root.append(svg("text", { x: x(v), y: height - 22, "text-anchor": x(v) > width - 24 ? "end" : "middle" }, text));
    root.append(svg("text", { class: "axis-name", x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "step"));
    root.append(svg("text", { class: "axis-name", x: 0, y: 11 }, unit));
    if (zero !== undefined) root.append(svg("line", { class: `series s${colourOf(zero)}`, x1: left, x2: width - right, y1: y(0), y2: y(0) }, svg("title", {}, zero)));
    for (const s of series) {
      const edge = [...s.points.map((p) => [x(p[0]), y(p[3])]), ...s.points.map((p) => [x(p[0]), y(p[2])]).reverse()];
      root.append(svg("path", { class: `band f${colourOf(s.colour)}`, d: line(edge) + "Z" }));
    }
    for (const s of series) root.append(svg("path", { class: `series s${colourOf(s.colour)}`, d: line(s.points.map((p) => [x(p[0]), y(p[1])])) }));
    const cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: top, y2: height - bottom, visibility: "hidden" });
    root.append(cursor);
    root.addEventListener("pointermove", (event) => {
      const at = x0 + ((event.clientX - root.getBoundingClientRect().left - left) / (width - left - right)) * (x1 - x0);
      const near = (s) => s.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
      const step = near(series[0])[0];
      cursor.setAttribute("x1", x(step));
      cursor.setAttribute("x2", x(step));
      cursor.setAttribute("visibility", "visible");
      readout.textContent = `step ${short(step)}: ` + series.slice(0, 8).map((s) => `${s.name} ${zero === undefined ? short(near(s)[1]) : signed(near(s)[1], 3)}`).join(" · ");
    });
    root.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); readout.textContent = ""; });
    return root;
  });
  return h("div", { class: "card plot" }, h("h3", {}, label), canvas, readout);
}

function histogram(data, threshold) {
  const { edges, kept, dropped } = data;
  const counts = kept.map((k, i) => k + dropped[i]);
  const heap = heapAtZero(data);
  // a heap that would press all the rest to the ground is cut, and says how high it is
  const most = Math.max(1, ...counts.map((count, i) => (i === heap ? 0 : 1.2 * count)), heap < 0 ? Math.max(...counts) : 0);
  return chart((width) => {
    const marks = ticks(0, most, 4, 1);
    const [left, right, top, bottom, height] = [roomFor(marks), 10, 30, 38, 260];
    const [x0, x1] = [edges[0], edges[edges.length - 1]];
    const x = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
    const y = (v) => height - bottom - (v / most) * (height - top - bottom);
    const total = kept.reduce((a, b) => a + b, 0);
    const root = svg("svg", { width, height, role: "img", "aria-label": `Distribution of the excess of ${whole(total + dropped.reduce((a, b) => a + b, 0))} mapped tokens, ${whole(total)} of them kept` });
    for (const { at: v, label: text } of marks) root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(v), y2: y(v) }), svg("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, text));
    counts.forEach((count, i) => {
      const [a, b] = [x(edges[i]) + 0.5, x(edges[i + 1]) - 0.5];
      const scale = Math.min(1, most / (count || 1));
      const [low, all] = [scale * dropped[i], scale * count];
      if (low) root.append(svg("rect", { class: "bar-dropped", x: a, width: Math.max(0.5, b - a), y: y(low), height: y(0) - y(low) }));
      if (all > low) root.append(svg("rect", { class: "bar-kept", x: a, width: Math.max(0.5, b - a), y: y(all), height: y(low) - y(all) }));
      if (scale < 1) root.append(svg("path", { class: "cut", d: `M${a - 3} ${y(0.93 * most)}L${b + 3} ${y(0.97 * most)}` }), svg("text", { class: "threshold-label", x: x(threshold ?? 0) > width * 0.6 ? b + 5 : a - 5, y: top + 9, "text-anchor": x(threshold ?? 0) > width * 0.6 ? "start" : "end" }, whole(Math.round(count))));
    });
    for (const { at: v, label: text } of ticks(x0, x1, Math.max(3, width / 90))) root.append(svg("text", { x: x(v), y: height - 20, "text-anchor": "middle" }, text));
    root.append(svg("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, "excess: student loss − teacher loss, nats"));
    if (isNumber(threshold) && threshold >= x0 && threshold <= x1) {
      const side = x(threshold) > width * 0.6 ? "end" : "start";
      root.append(
        svg("line", { class: "threshold", x1: x(threshold), x2: x(threshold), y1: top - 14, y2: y(0) }),
        svg("text", { class: "threshold-label", x: x(threshold) + (side === "end" ? -6 : 6), y: top - 8, "text-anchor": side }, Math.abs(threshold) < 0.005 ? "kept from about 0" : `kept from ${fixed(threshold)}`),
      );
    }
    return root;
  });
}

// The bin at zero, where it holds more than twice as many as any other; else -1.
function heapAtZero({ edges, kept, dropped }) {
  const counts = kept.map((k, i) => k + dropped[i]);
  const zero = counts.findIndex((_, i) => edges[i] <= 0 && edges[i + 1] > 0);
  return zero >= 0 && counts.every((count, i) => i === zero || 2 * count < counts[zero]) ? zero : -1;
}

function heapNote(data) {
  const at = heapAtZero(data);
  if (at < 0) return null;
  const count = Math.round(data.kept[at] + data.dropped[at]);
  const certain = isNumber(data.certain) ? ` ${percent(data.certain / count)} of them are tokens that both models predict with more than 90\u00a0%.` : "";
  return h("p", { class: "small" }, `The bar at zero is cut: ${whole(count)} tokens on which student and teacher lose the same.${certain}`);
}

// One row per group: every seed a dot, the mean a bar, its 95 % interval a line.
function dotPlot(measure, groups, at) {
  const values = groups.flatMap((g) => g.values[at].filter(isNumber));
  const ends = groups.flatMap((g) => (seedsOf(g) === 2 && !g.intervals ? [] : interval(g, at) || [])); // that of two seeds would hide all else
  let [x0, x1] = [Math.min(...values, ...ends), Math.max(...values, ...ends)];
  // a difference of a thousandth does not fill the width where no interval says that it is real
  const least = ends.length ? 0 : 0.01 * Math.max(Math.abs(x0), Math.abs(x1));
  const pad = Math.max(0.12 * (x1 - x0), (least - (x1 - x0)) / 2, x1 > x0 ? 0 : 0.12 * (Math.abs(x0) || 1));
  [x0, x1] = [x0 - pad, x1 + pad];
  const plot = chart((width) => {
    const summaries = groups.map((group) => summary(group, at, measure));
    const label = Math.min(0.5 * width, 18 + 7 * Math.max(...groups.map((g) => g.name.length)));
    const room = Math.floor(label / 7);
    const [top, step, bottom] = [6, 34, 24];
    const height = top + step * groups.length + bottom;
    const x = (v) => label + ((Math.max(x0, Math.min(x1, v)) - x0) / (x1 - x0)) * (width - label - 14);
    const root = svg("svg", { width, height, role: "img", "aria-label": `${measure.name} by setting, one dot per seed: ${groups.map((g, i) => `${g.name} ${summaries[i]}`).join("; ").slice(0, 900)}` });
    for (const { at: v, label: text } of ticks(x0, x1, Math.max(3, (width - label) / 90))) root.append(svg("line", { class: "axis", x1: x(v), x2: x(v), y1: top, y2: height - bottom }), svg("text", { x: x(v), y: height - 6, "text-anchor": "middle" }, text));
    groups.forEach((group, row) => {
      const y = top + step * (row + 0.5);
      const known = group.values[at].filter(isNumber);
      const name = group.name.length > room ? group.name.slice(0, room - 1) + "…" : group.name;
      root.append(svg("text", { class: "name", x: 0, y: y + 4 }, name, svg("title", {}, `${group.name}: ${summaries[row]}`)));
      const range = interval(group, at);
      if (range) root.append(svg("line", { class: `interval s${colourOf(group.name)}`, x1: x(range[0]), x2: x(range[1]), y1: y, y2: y }, svg("title", {}, `95 %: ${range.map((v) => fixed(v, measure.digits)).join(" to ")}`)));
      for (const v of known) root.append(svg("circle", { class: `f${colourOf(group.name)}`, cx: x(v), cy: y, r: 5, opacity: 0.72 }));
      if (known.length > 1) { const m = mean(known); root.append(svg("line", { class: "mean", x1: x(m), x2: x(m), y1: y - 11, y2: y + 11 })); }
    });
    return root;
  });
  const arrow = measure.better === "lower" ? "lower is better" : "higher is better";
  return h("div", { class: "card" }, h("h3", {}, measure.name), h("p", { class: "small" }, [measure.unit, arrow].filter(Boolean).join(" · ")), plot);
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
function deviation(values) {
  if (values.length < 2) return null;
  const m = mean(values);
  return Math.sqrt(values.reduce((a, b) => a + (b - m) ** 2, 0) / (values.length - 1));
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

// The 95 % interval of a group's mean: Student's t over seeds, or over questions with one seed.
const STUDENT = [12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26];
function interval(group, at) {
  if (group.intervals?.[at]) return group.intervals[at];
  const values = group.values[at].filter(isNumber);
  const s = plusMinus(group, at);
  if (!s) return null; // all wrong or all right: the error says nothing
  const half = values.length > 1 ? ((STUDENT[values.length - 2] || 2) * s) / Math.sqrt(values.length) : 1.96 * s;
  return [mean(values) - half, mean(values) + half];
}

// The group that is better than all others by more than the two intervals, each half of their width, allow; null where none is.
function clearWinner(groups, at, better) {
  const known = groups.filter((g) => g.values[at].some(isNumber));
  const sign = better === "lower" ? -1 : 1;
  const centre = (g) => sign * mean(g.values[at].filter(isNumber));
  const [first, ...others] = [...known].sort((a, b) => centre(b) - centre(a));
  const half = (g) => { const range = interval(g, at); return range ? (range[1] - range[0]) / 2 : NaN; };
  return others.length && others.every((g) => centre(first) - centre(g) > Math.hypot(half(first), half(g))) ? first : null;
}
