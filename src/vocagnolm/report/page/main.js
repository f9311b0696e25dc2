// Puts the page together from the parts that have data.

const THEMES = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");
function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  themeButton.textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[name];
  themeButton.setAttribute("aria-label", `Colour theme: ${name}. Press to change.`);
  themeButton.dataset.now = name;
}
function remembered() {
  try { return localStorage.getItem("vocagnolm-theme"); } catch { return null; } // storage may be off
}
setTheme(THEMES.includes(remembered()) ? remembered() : "auto");
themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(themeButton.dataset.now) + 1) % THEMES.length];
  setTheme(next);
  try { localStorage.setItem("vocagnolm-theme", next); } catch { /* not kept, still set */ }
});

document.getElementById("title").textContent = page.title;
if (page.subtitle) {
  const subtitle = document.getElementById("subtitle");
  subtitle.textContent = page.subtitle;
  subtitle.hidden = false;
}

// The result first: what the settings reached. Without one, how the pair fits and what was kept.
function headline() {
  const { results, statistics: stats, preflight: [pair] } = page;
  let [items, caption] = [[], ""];
  if (results) {
    const at = Math.max(0, results.measures.findIndex((m) => m.name.startsWith("avg")));
    const { name, unit, digits = 2 } = results.measures[at];
    const known = results.groups.filter((g) => g.values[at].some(isNumber));
    const ranges = known.map((g) => interval(g, at));
    const sign = unit === "%" ? " %" : "";
    items = known.map((g, row) => [g.about || g.name, fixed(mean(g.values[at].filter(isNumber)), digits) + sign, ranges[row] && ranges[row].map((v) => fixed(v, digits)).join(" to ")]);
    caption = [unit && !sign ? `${name}, ${unit}` : name, ranges.some(Boolean) ? "below it the 95 % interval" : ""].filter(Boolean).join("; ");
  } else {
    if (pair && page.preflight.length > 1) caption = `Vocabularies and coverage: with ${pair.teacher}, the first of ${page.preflight.length} teachers`;
    if (stats) items.push(page.selection?.graded ? ["mean weight of a token", fixed(stats.kept / stats.tokens)] : ["tokens kept", percent(stats.kept / stats.tokens)]);
    if (pair && isNumber(pair.overlap_raw)) items.push(["vocabulary shared", percent(pair.overlap_raw)]);
    if (pair && isNumber(pair.ios)) items.push(["of the text covered", percent(pair.ios)]);
    if (pair && isNumber(pair.one_to_one)) items.push(["tokens one to one", percent(pair.one_to_one)]);
    const shown = page.passages.reduce((sum, p) => sum + p.student.text.length, 0);
    if (shown) items.push(["tokens on this page", whole(shown)]);
    if (page.runs.length) items.push([page.runs.length === 1 ? "run" : "runs", whole(page.runs.length)]);
  }
  const list = document.getElementById("headline");
  if (caption) list.before(h("p", { class: "small headline-name" }, caption));
  for (const [name, value, range] of items.slice(0, 6)) list.append(h("div", {}, h("dt", {}, name), h("dd", {}, value, range ? h("small", {}, range) : null)));
  list.hidden = !items.length;
}
headline();

const main = document.getElementById("main");
const nav = document.getElementById("nav");
for (const note of page.notes) main.append(h("p", { class: "note", vars: { "margin-top": "1.4rem" } }, note));
for (const [id, [name, make]] of Object.entries(SECTIONS)) {
  const element = make();
  if (!element) continue;
  if (element.id !== id) throw new Error(`section ${id} calls itself ${element.id}`);
  main.append(element);
  element.mount?.(); // what has to measure itself waits until it is in the page
  nav.append(h("a", { href: "#" + id }, name));
}
document.getElementById("footer").append("Made by vocagnolm. This file stands alone: it holds its data and asks for nothing from the network.");
document.documentElement.dataset.ready = "true";
