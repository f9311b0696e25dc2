// The parts of the page below the text. Each returns an element, or null when it has no data.

function resultsSection() {
  const results = page.results;
  if (!results) return null;
  const element = section("results", "The result");
  if (results.verdict) element.append(h("p", { class: "verdict" }, results.verdict));
  const measured = (at) => results.groups.filter((g) => g.values[at].some(isNumber));
  // a single setting has nothing to be compared with: its numbers are in the table
  element.append(h("div", { class: "grid" }, results.measures.map((m, at) => (measured(at).length > 1 ? dotPlot(m, measured(at), at) : null))));
  const best = results.measures.map((m, at) => clearWinner(results.groups, at, m.better));
  const cell = (group, at) => {
    const values = group.values[at].filter(isNumber);
    if (!values.length) return h("td", {}, "–");
    const m = mean(values);
    const s = plusMinus(group, at);
    const { digits = 2 } = results.measures[at];
    const fewer = values.length < seedsOf(group) ? `, n = ${values.length}` : "";
    return h("td", { class: group === best[at] ? "best" : "" }, fixed(m, digits), s === null && !fewer ? null : h("span", { class: "pm" }, (s === null ? "" : ` ± ${fixed(s, digits)}`) + fewer));
  };
  const most = Math.max(0, ...results.groups.map(seedsOf));
  const asked = results.groups.some((g) => seedsOf(g) === 1 && results.measures.some((_, at) => plusMinus(g, at) !== null));
  const caption = [
    most > 1 ? "± is the standard deviation over n seeds." : null,
    asked ? `${most > 1 ? "With one seed it" : "± "} is the standard error over questions or documents.`.replace("  ", " ") : null,
    results.groups.some((g) => results.measures.some((_, at) => interval(g, at))) ? "In the plots a line is the 95 % interval of the mean." : null,
    best.some(Boolean) ? "Bold: better than all others by more than the 95 % intervals allow." : null,
  ].filter(Boolean).join(" ");
  element.append(h("div", { class: "card table", vars: { "margin-top": "1.1rem" } }, h("table", {},
    caption ? h("caption", {}, caption) : null,
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), h("th", { scope: "col" }, "n"), results.measures.map((m) => h("th", { scope: "col" }, m.name + (m.unit ? `, ${m.unit}` : ""))))),
    h("tbody", {}, results.groups.map((g) => h("tr", {}, h("th", { scope: "row" }, g.name, g.about ? h("small", {}, g.about) : null), h("td", { class: "count" }, whole(seedsOf(g))), results.measures.map((_, at) => cell(g, at))))),
  )));
  if (results.note) element.append(h("p", { class: "small", vars: { "margin-top": ".8rem" } }, results.note));
  return element;
}

function rankedList(title, caption, tokens) {
  return h("div", { class: "card" }, h("h3", {}, title), h("p", { class: "small" }, caption),
    tokens.length
      ? h("ol", { class: "ranked" }, tokens.map((t) => h("li", {}, showToken(h("span", { class: "tok" }), t.name, { spaces: true, limit: 40 }), h("span", { class: "num" }, `${short(t.kept)} / ${whole(t.tokens)}`))))
      : h("p", {}, "None occurs often enough to say."));
}

function selectionSection() {
  const stats = page.statistics;
  if (!stats) return null;
  const rule = page.selection || {};
  const share = stats.kept / stats.tokens;
  const everything = !rule.graded && share === 1; // bars that all reach the end say nothing
  if (everything && !stats.excess) return null;
  const element = section("selection", "What was kept", `${rule.graded ? `${whole(stats.tokens)} target tokens count by their weight, ${fixed(share)} on average` : `${whole(stats.kept)} of ${whole(stats.tokens)} target tokens (${percent(share)}) count in the loss`}${stats.unmapped ? `; ${whole(stats.unmapped)} are unmapped${rule.unmapped ? ` (${rule.unmapped})` : ""}` : ""}.`);
  const amount = (part) => (rule.graded ? fixed(part) : percent(part));
  const across = (part) => (100 * Math.max(0, Math.min(1, part))).toFixed(2) + "%";
  const bars = (shares) => h("div", { class: "bars" }, [...shares].sort((a, b) => b.kept / b.tokens - a.kept / a.tokens).flatMap(({ name, tokens, kept, interval: range }) => [
    h("span", {}, name || "not said"),
    h("div", { class: "track", "aria-hidden": "true" }, h("i", { class: "fill", vars: { "--w": across(kept / tokens) } }), h("i", { class: "ref", vars: { "--x": across(share) } }),
      range ? h("i", { class: "range", vars: { "--x": across(range[0]), "--w": across(range[1] - range[0]) } }) : null),
    h("span", { class: "amount" }, amount(kept / tokens), " ", h("small", {}, `${range ? `(${range.map((end) => (rule.graded ? fixed(end) : fixed(100 * end, 1))).join(" to ")}) ` : ""}of ${short(tokens)}`)),
  ]));
  const guided = ["guided", "rho1"].includes(rule.method);
  const grid = h("div", { class: "grid pairs" });
  const what = rule.graded ? "Mean weight" : "Kept share";
  const upright = `The upright line is that of all tokens, ${amount(share)}`;
  const bySource = stats.sources?.length > 1;
  if (!everything) grid.append(h("div", { class: "card" },
    bySource ? [h("h3", {}, `${what} by kind of text`), h("p", { class: "small" }, `${upright}; the thin line and the brackets are the 95\u00a0% interval over documents.`), bars(stats.sources)] : null,
    h("h3", {}, `${what} by kind of token`), bySource ? null : h("p", { class: "small" }, `${upright}.`), bars(stats.kinds)));
  if (stats.excess) {
    grid.append(h("div", { class: "card" }, h("h3", {}, isNumber(rule.threshold) ? "Excess and the threshold" : "Excess"),
      h("p", { class: "keys" }, ["kept", "dropped"].map((name) => h("span", {}, svg("svg", { width: 14, height: 10 }, svg("rect", { class: "bar-" + name, width: 14, height: 10, rx: 2 })), name))),
      histogram(stats.excess, rule.threshold), heapNote(stats.excess)));
  }
  if (!everything) grid.append(rankedList("Most often kept", guided ? "Tokens the student is told to learn: kept / seen." : "Kept / seen.", stats.most_kept));
  if (!everything) grid.append(rankedList("Most often dropped", guided ? "Tokens it knows already, or the teacher cannot predict either: kept / seen." : "Kept / seen.", stats.most_dropped));
  element.append(grid);
  return element;
}

// What a tracker draws of one run is left to it; here runs are compared.
function curvesSection() {
  const runs = page.runs.filter((run) => run.loss.length > 1);
  if (runs.length < 2) return null;
  const settings = [...new Set(runs.map(settingOf))];
  // one line for each setting with its seeds as a band; of one setting alone, a line for each run
  const groups = settings.length > 1 ? settings.map((name) => [name, runs.filter((run) => settingOf(run) === name)]) : runs.map((run) => [run.name, [run]]);
  const series = groups.map(([name, members]) => {
    const values = new Map();
    for (const run of members) for (const [step, value] of run.loss) values.set(step, [...(values.get(step) || []), value]);
    const points = [...values].sort((a, b) => a[0] - b[0]).map(([step, all]) => [step, mean(all), Math.min(...all), Math.max(...all)]);
    return { name: members.length > 1 ? `${name} (n = ${members.length})` : name, colour: name, points };
  });
  const binned = Math.max(...runs.map((run) => run.steps_per_point || 1));
  const caption = ["The mean loss over all tokens of a step, kept or not.", runs.length > series.length ? "A band spans the seeds of a setting." : null, binned > 1 ? `Every point is the mean of up to ${binned} steps.` : null];
  const element = section("curves", "Training, side by side", caption.filter(Boolean).join(" "));
  const key = (colour) => svg("svg", { width: 30, height: 8, "aria-hidden": "true" }, svg("line", { class: `series s${colourOf(colour)}`, x1: 1, x2: 29, y1: 4, y2: 4 }));
  element.append(h("div", { class: "keys" }, series.map((s) => h("span", {}, key(s.colour), s.name))));
  const differences = settings.length > 1 ? fromFirst(groups) : [];
  if (!differences.length || !series.every((s) => isFlat(s.points))) element.append(lineChart(series, { label: "Loss over all tokens", unit: "nats per token" }));
  if (differences.length) element.append(lineChart(differences, { label: `Loss minus that of ${settings[0]} with the same seed`, unit: "nats per token, step by step", zero: settings[0] }));
  return element;
}

// What the runs of a step have in common, such as an easy batch, is not in the difference of two of them.
function fromFirst([[, first], ...others]) {
  return others.flatMap(([name, members]) => {
    const values = new Map();
    for (const run of members) {
      const base = new Map(first.find((one) => isNumber(one.seed) && one.seed === run.seed)?.loss);
      for (const [step, value] of run.loss) if (base.has(step)) values.set(step, [...(values.get(step) || []), value - base.get(step)]);
    }
    const points = [...values].sort((a, b) => a[0] - b[0]).map(([step, all]) => [step, mean(all), Math.min(...all), Math.max(...all)]);
    return points.length > 1 ? [{ name, colour: name, points }] : [];
  });
}

// Between its first and its last third the line moves less than it jumps from point to point.
function isFlat(points) {
  if (points.length < 12) return false;
  const third = Math.floor(points.length / 3);
  const height = (some) => mean(some.map((p) => p[1]));
  const jumps = points.slice(1).map((p, at) => Math.abs(p[1] - points[at][1]));
  return Math.abs(height(points.slice(0, third)) - height(points.slice(-third))) < 2 * mean(jumps);
}

function preflightSection() {
  if (!page.preflight.length) return null;
  const element = section("pair", page.preflight.length > 1 ? "The pairs" : "The pair", "How the two vocabularies fit before anything is trained. Covered means that all of a student token's text lies under teacher tokens (IoS).");
  const rows = [
    ["Student vocabulary", (p) => (p.student_vocabulary ? whole(p.student_vocabulary) : null)],
    ["Teacher vocabulary", (p) => (p.teacher_vocabulary ? whole(p.teacher_vocabulary) : null)],
    ["Shared, of the teacher's tokens", (p) => (isNumber(p.overlap_raw) ? percent(p.overlap_raw) : null)],
    ["Shared, space marks made equal", (p) => (isNumber(p.overlap_marks) ? percent(p.overlap_marks) : null)],
    ["Shared, by bytes", (p) => (isNumber(p.overlap_bytes) ? percent(p.overlap_bytes) : null)],
    ["Covered (IoS)", (p) => (isNumber(p.ios) ? percent(p.ios) : null)],
    ["IoU", (p) => (isNumber(p.iou) ? percent(p.iou) : null)],
    ["One to one", (p) => (isNumber(p.one_to_one) ? percent(p.one_to_one) : null)],
    ["One student token, several teacher's", (p) => (isNumber(p.one_to_many) ? percent(p.one_to_many) : null)],
    ["Several student tokens, one teacher's", (p) => (isNumber(p.many_to_one) ? percent(p.many_to_one) : null)],
    ["Unmapped", (p) => (isNumber(p.unmapped) ? percent(p.unmapped) : null)],
    ["Student tokens", (p) => (p.student_tokens ? whole(p.student_tokens) : null)],
    ["Teacher tokens", (p) => (p.teacher_tokens ? whole(p.teacher_tokens) : null)],
    ["Text, bytes", (p) => (p.text_bytes ? whole(p.text_bytes) : null)],
    ["Spans tile the text", (p) => (p.exact === undefined ? null : p.exact ? "exactly" : "with losses")],
  ].filter(([, value]) => page.preflight.some((p) => value(p) !== null));
  element.append(h("div", { class: page.preflight.length > 2 ? "card table" : "card table narrow" }, h("table", {},
    h("thead", {}, h("tr", {}, h("td"), page.preflight.map((p) => h("th", { scope: "col" }, `${p.student} ← ${p.teacher}`)))),
    h("tbody", {}, rows.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), page.preflight.map((p) => h("td", {}, value(p) ?? "–"))))))));
  return element;
}

function facts(entries) {
  return h("dl", { class: "facts" }, Object.entries(entries).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
}

function recipeSection() {
  const runs = page.runs.filter((run) => run.recipe || Object.keys(run.facts).length);
  const rule = page.selection ? Object.fromEntries(Object.entries(page.selection).filter(([k]) => !["graded", "guided", "label"].includes(k)).map(([k, v]) => [k.replaceAll("_", " "), typeof v === "number" ? short(v) : v])) : {};
  const environments = page.runs.filter((run) => Object.keys(run.environment).length);
  if (!runs.length && !Object.keys(page.environment).length && !environments.length && !Object.keys(rule).length) return null;
  const element = section("recipe", "Recipe and environment", "Enough to run it again.");
  const grid = h("div", { class: "grid" });
  if (Object.keys(rule).length) grid.append(h("div", { class: "card" }, h("h3", {}, "Selection rule"), facts(rule)));
  if (Object.keys(page.environment).length) grid.append(h("div", { class: "card" }, h("h3", {}, "This page was made with"), facts(page.environment)));
  element.append(grid);
  const folded = h("div", { class: "card", vars: { "margin-top": "1.1rem" } });
  for (const run of page.runs) {
    if (!run.recipe && !Object.keys(run.facts).length && !Object.keys(run.environment).length) continue;
    folded.append(h("details", { open: page.runs.length === 1 }, h("summary", {}, run.name),
      Object.keys(run.facts).length ? facts(run.facts) : null,
      run.recipe ? h("pre", { tabindex: "0" }, run.recipe) : null,
      Object.keys(run.environment).length ? facts(run.environment) : null));
  }
  if (folded.childElementCount) element.append(folded);
  return element;
}

// All sections in their order: id, name in the navigation, and what makes it (null where there are no data).
const SECTIONS = {
  results: ["Result", resultsSection],
  tokens: ["Tokens", tokensSection],
  selection: ["Kept", selectionSection],
  curves: ["Training", curvesSection],
  pair: ["Pair", preflightSection],
  recipe: ["Recipe", recipeSection],
};
