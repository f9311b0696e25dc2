// The text as student tokens, coloured, marked, filtered, walked with the keyboard.

const MODES = {
  excess: "excess loss",
  student: "student loss",
  guidance: "teacher loss",
  weight: "weight in the loss",
  mapping: "mapping",
};

// With several teachers the first one's tokens give the kind of a mapping.
const lead = (passage) => passage.teachers[0];
const graded = () => Boolean(page.selection?.graded);

// Everything about a passage that is derived from its columns, computed when it is first shown.
const derived = new Map();

function derive(passage) {
  if (derived.has(passage)) return derived.get(passage);
  const n = passage.student.text.length;
  const kind = new Array(n).fill("");
  if (lead(passage)) {
    const { first, last } = lead(passage);
    let before = -1; // the last mapped token: only neighbours can share a teacher token
    for (let i = 0; i < n; i++) {
      if (first[i] < 0) {
        kind[i] = passage.teachers.some((teacher) => teacher.first[i] >= 0) ? "m1n" : "un";
        continue;
      }
      kind[i] = first[i] < last[i] ? "m1n" : "m11";
      if (before >= 0 && last[before] >= first[i]) {
        if (kind[before] === "m11") kind[before] = "mn1";
        if (kind[i] === "m11") kind[i] = "mn1";
      }
      before = i;
    }
  } else if (passage.guidance) {
    for (let i = 0; i < n; i++) if (!isNumber(passage.guidance[i])) kind[i] = "un";
  }
  // a token without a student loss is no target: neither kept nor dropped
  const fate = new Array(n).fill("");
  if (passage.weights) {
    for (let i = 0; i < n; i++) {
      const target = !passage.student.nll || isNumber(passage.student.nll[i]);
      const weight = passage.weights[i];
      fate[i] = !target ? "none" : weight <= 0 ? "dropped" : weight < 1 ? "part" : "kept";
    }
  }
  const count = {};
  for (const list of [kind, fate]) for (const name of list) if (name) count[name] = (count[name] || 0) + 1;
  const result = { kind, fate, count, studentStart: starts(passage.student), teacherStart: passage.teachers.map(starts) };
  derived.set(passage, result);
  return result;
}

function starts(row) {
  const result = new Array(row.length.length);
  let end = 0;
  for (let i = 0; i < result.length; i++) {
    result[i] = end + (row.gap ? row.gap[i] : 0);
    end = result[i] + row.length[i];
  }
  return result;
}

// Rank among all mapped tokens of the page: 1 is the largest excess.
const excessDescending = (() => {
  const all = [];
  for (const passage of page.passages) for (const value of passage.excess || []) if (isNumber(value)) all.push(value);
  return Float64Array.from(all).sort().reverse();
})();

function rankOf(value) {
  let low = 0;
  let high = excessDescending.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (excessDescending[middle] > value) low = middle + 1;
    else high = middle;
  }
  return low + 1;
}

// Colours come in steps whose width follows the page's own spread, rounded to a readable number.
function stepFor(columns) {
  const sizes = [];
  for (const column of columns) for (const value of column || []) if (isNumber(value)) sizes.push(Math.abs(value));
  if (!sizes.length) return 1;
  const sorted = Float64Array.from(sizes).sort();
  const wide = sorted[Math.floor(0.95 * (sorted.length - 1))] / 4;
  const nice = [0.05, 0.1, 0.2, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5];
  return nice.find((step) => step >= wide * 0.85) || 5;
}

const scales = {
  excess: stepFor(page.passages.map((p) => p.excess)),
  loss: stepFor(page.passages.flatMap((p) => [p.student.nll, p.guidance])),
};

// Excess: nine steps, the middle one around zero. Losses: the orange half alone.
function colourClass(value, mode) {
  if (!isNumber(value)) return "";
  if (mode === "weight") return " c" + Math.max(-4, Math.min(4, Math.round(4 * value)));
  const step = mode === "excess" ? scales.excess : scales.loss;
  const at = mode === "excess" ? Math.round(value / step) : Math.floor(value / step);
  return " c" + Math.max(mode === "excess" ? -4 : 0, Math.min(4, at));
}

function tokenClass(passage, info, i, mode) {
  let name = "t";
  if (info.fate[i]) name += " " + info.fate[i];
  if (info.fate[i] === "part") name += " w" + Math.max(1, Math.min(3, Math.round(4 * passage.weights[i])));
  if (info.kind[i]) name += " " + info.kind[i];
  if (mode === "mapping") {
    const colours = { m11: " c0", m1n: " c2", mn1: " c-2" };
    return name + (colours[info.kind[i]] || "");
  }
  const column = { excess: passage.excess, student: passage.student.nll, guidance: passage.guidance, weight: passage.weights }[mode];
  return name + (column ? colourClass(column[i], mode) : "");
}

// Blocks end at line breaks where they can, so that laying them out apart does not show. A block
// far from view is plain text (it can be searched and has its height); its tokens are made when
// it comes near.
const BLOCK_TOKENS = 160;
const BLOCK_LIMIT = 900;
const HIDDEN_BUT_BREAKS = new RegExp("(?!\\n)" + HIDDEN.source, "gu");

function makeText(container) {
  let passage, info, mode, blocks, active;
  let observer = null;

  function cut(texts, breaks) {
    const result = [];
    let from = 0;
    const begins = new Set(breaks || []);
    texts.forEach((text, i) => {
      const held = i + 1 - from;
      if (begins.has(i + 1) || (held >= BLOCK_TOKENS && text.endsWith("\n")) || held >= BLOCK_LIMIT || i === texts.length - 1) {
        result.push({ from, to: i, begins: begins.has(from), element: null, spans: null });
        from = i + 1;
      }
    });
    return result;
  }

  function load(newPassage, newInfo, newMode) {
    [passage, info, mode, active] = [newPassage, newInfo, newMode, -1];
    const texts = passage.student.text;
    blocks = cut(texts, passage.breaks);
    observer?.disconnect();
    observer = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) fill(blocks[Number(entry.target.dataset.block)]);
    }, { root: container, rootMargin: "900px 0px" });
    blocks.forEach((block, at) => {
      block.element = h("div", { class: block.begins ? "block begins" : "block", role: "presentation", "data-block": at });
      block.element.textContent = texts.slice(block.from, block.to + 1).join("").replace(/\n$/, "").replace(HIDDEN_BUT_BREAKS, "\u00b7");
    });
    container.replaceChildren(...blocks.map((block) => block.element));
    if (blocks.length) fill(blocks[0]);
    for (const block of blocks) observer.observe(block.element);
  }

  const className = (i) => tokenClass(passage, info, i, mode) + (i === active ? " on" : "");

  function fill(block) {
    if (!block || block.spans) return;
    observer.unobserve(block.element);
    block.spans = [];
    for (let i = block.from; i <= block.to; i++) {
      const span = document.createElement("span");
      span.className = className(i);
      span.setAttribute("role", "option");
      span.setAttribute("data-i", i);
      // a block ends its last line by itself
      showToken(span, passage.student.text[i], { breaks: true, open: i === block.to, limit: 200 });
      block.spans.push(span);
    }
    block.element.replaceChildren(...block.spans);
  }

  function span(i) {
    let [low, high] = [0, blocks.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (blocks[middle].to < i) low = middle + 1;
      else high = middle;
    }
    const block = blocks[low];
    if (!block || i < block.from) return null;
    fill(block);
    return block.spans[i - block.from];
  }

  function recolour(newMode) {
    mode = newMode;
    for (const block of blocks) block.spans?.forEach((one, at) => { one.className = className(block.from + at); });
  }

  // Roving tabindex: one token is in the tab order, the arrow keys move it.
  function activate(i) {
    const before = active >= 0 ? span(active) : null;
    if (before) {
      before.removeAttribute("tabindex");
      before.removeAttribute("aria-selected");
      before.classList.remove("on");
    }
    active = i;
    const now = span(i);
    if (!now) return null;
    now.tabIndex = 0;
    now.setAttribute("aria-selected", "true");
    now.setAttribute("aria-label", tokenLabel(passage, info, i));
    now.classList.add("on");
    return now;
  }

  return { load, span, recolour, activate };
}

function legend(passage, info, mode) {
  const items = [];
  const ramp = (from, to) => h("span", { class: "ramp", "aria-hidden": "true" }, Array.from({ length: to - from + 1 }, (_, k) => h("i", { class: "c" + (from + k) })));
  if (mode === "excess") {
    const end = 4 * scales.excess;
    items.push(h("span", { class: "scale" }, `excess ${fixed(-end, 1)}`, ramp(-4, 4), `+${fixed(end, 1)} nats`));
    items.push(h("span", {}, "orange: the student has something to learn here; blue: the teacher finds it harder"));
  } else if (mode === "weight") {
    const from = passage.weights.some((w) => w < 0) ? -4 : 0;
    items.push(h("span", { class: "scale" }, `weight ${from / 4}`.replace("-", MINUS), ramp(from, 4), "1 and more"));
  } else if (mode === "student" || mode === "guidance") {
    items.push(h("span", { class: "scale" }, `${MODES[mode]} 0`, ramp(0, 4), `${fixed(4 * scales.loss, 1)} nats and more`));
  } else {
    const names = { m11: ["c0", "one to one"], m1n: ["c2", "several teacher tokens"], mn1: ["c-2", "shares a teacher token"] };
    for (const [kind, [colour, label]] of Object.entries(names)) if (info.count[kind]) items.push(h("span", {}, h("i", { class: "swatch " + colour }), label));
  }
  if (passage.weights && graded()) items.push(h("span", {}, ["w1", "w2", "w3", ""].map((shade) => h("i", { class: `swatch ${shade ? "part" : "kept"} ${shade}` })), "underlined: the darker, the more it counts in the loss"));
  else if (passage.weights) items.push(h("span", {}, h("i", { class: "swatch kept" }), "underlined: kept in the loss"));
  if (info.count.un) items.push(h("span", {}, h("i", { class: "swatch un" }), "hatched: no teacher token"));
  return items;
}

// In words: what becomes of a token.
function fateName(passage, info, i) {
  if (info.fate[i] === "none") return "no target";
  return graded() ? `weight ${fixed(passage.weights[i])}` : info.fate[i];
}

function tokenLabel(passage, info, i) {
  const parts = [spoken(passage.student.text[i])];
  if (info.fate[i]) parts.push(fateName(passage, info, i));
  if (info.kind[i] === "un") parts.push("unmapped");
  if (passage.student.trained?.[i]) parts.push("trained on: " + passage.student.trained[i]);
  if (passage.student.nll) parts.push("student loss " + fixed(passage.student.nll[i]));
  if (passage.guidance) parts.push("teacher loss " + fixed(passage.guidance[i]));
  if (passage.excess) parts.push("excess " + fixed(passage.excess[i]));
  return parts.join(", ");
}

function tokenizationsTitle() {
  const most = Math.max(...page.passages.map((p) => p.teachers.length));
  return most === 1 ? "The two tokenizations" : `The ${most + 1} tokenizations`;
}

function tokensSection() {
  if (!page.passages.length) return null;
  const rule = page.selection;
  const title = rule && !rule.guided ? "What counts in the loss" : page.passages.some((p) => p.excess) ? "What the teacher changed" : page.passages.some(lead) ? tokenizationsTitle() : "The text";
  const caption = ["The text as the student reads it, token by token."];
  if (page.passages.some(lead)) caption.push("Point at a token, or walk with the arrow keys, to see the teacher tokens that cover it" + (page.passages.some((p) => p.teachers.some((t) => t.alternatives)) ? ", and what the teacher expected there." : "."));
  const several = page.passages.find((p) => p.teachers.length > 1);
  if (several) caption.push(`One to one, several and unmapped are counted and coloured for ${lead(several).name}, the first of ${several.teachers.length} teachers.`);
  if (rule && page.runs.length) caption.push(`The rule of the run: ${rule.label || rule.method}.`);
  if (rule && !rule.guided && page.passages.some((p) => p.excess)) caption.push("The teacher's losses are shown beside it; they decide nothing here.");
  const element = section("tokens", title, caption.join(" "));
  const state = { passage: null, info: null, mode: "", filter: "all", active: 0 };
  const box = h("div", { class: "text", role: "listbox", "aria-label": "Student tokens", "aria-orientation": "horizontal" });
  const text = makeText(box);
  const key = h("div", { class: "legend" });
  const tools = h("div", { class: "tools" });
  const inspector = makeInspector();
  const rows = makeRows((i) => choose(i, { focus: false }));
  element.append(tools, h("div", { class: "reader" }, box, inspector.element), key, rows.element);

  const modesOf = (p) => Object.keys(MODES).filter((m) => ({ excess: p.excess, student: p.student.nll, guidance: p.guidance, weight: graded() && p.weights, mapping: lead(p) })[m]);

  function drawTools() {
    tools.textContent = "";
    if (page.passages.length > 1) {
      const pick = h("select", { id: "passage" }, page.passages.map((p, at) => h("option", { value: at }, p.title)));
      pick.value = page.passages.indexOf(state.passage);
      pick.addEventListener("change", () => show(page.passages[Number(pick.value)]));
      tools.append(h("label", {}, "Text", pick));
    }
    const modes = modesOf(state.passage);
    if (modes.length > 1) {
      const colour = h("select", { id: "colour" }, modes.map((m) => h("option", { value: m }, MODES[m])));
      colour.value = state.mode;
      colour.addEventListener("change", () => recolour(colour.value));
      tools.append(h("label", {}, "Colour", colour));
    }
    const names = { all: "All", kept: graded() ? "Counts fully" : "Kept", part: "In part", dropped: graded() ? "Not at all" : "Dropped", none: "No target", m11: "1:1", m1n: "1:N", mn1: "N:1", un: "Unmapped" };
    const counts = { all: state.passage.student.text.length, ...state.info.count };
    if (!state.passage.weights && !lead(state.passage)) return;
    const choices = (label, wanted) => tools.append(h("div", { class: "choices", role: "group", "aria-label": label }, wanted.map((name) => h("button", {
      type: "button", "data-filter": name, "aria-pressed": String(state.filter === name), disabled: !counts[name],
      onclick: () => filter(name),
    }, names[name], " ", h("span", { class: "n" }, whole(counts[name] || 0))))));
    // the parts behind "All" add up to it; the unmapped are among them, and stand apart
    if (!state.passage.weights) return choices("Show", ["all", "m11", "m1n", "mn1", "un"]);
    choices("Show", ["all", "kept", ...(counts.part ? ["part"] : []), "dropped", ...(counts.none ? ["none"] : [])]);
    if (counts.un) choices("Show those without a teacher token", ["un"]);
  }

  function filter(name) {
    state.filter = name;
    box.dataset.filter = name;
    for (const button of tools.querySelectorAll("button[data-filter]")) button.setAttribute("aria-pressed", String(button.dataset.filter === name));
  }

  function recolour(mode) {
    state.mode = mode;
    text.recolour(mode);
    key.replaceChildren(...legend(state.passage, state.info, mode));
    rows.draw(state.passage, state.info, state.active, mode);
  }

  function choose(i, { focus = true } = {}) {
    state.active = i;
    const span = text.activate(i);
    if (!span) return;
    if (focus) span.focus();
    inspector.show(state.passage, state.info, i);
    rows.draw(state.passage, state.info, i, state.mode);
  }

  function show(passage) {
    state.passage = passage;
    state.info = derive(passage);
    const modes = modesOf(passage);
    if (!modes.includes(state.mode)) state.mode = modes[0] || "";
    text.load(passage, state.info, state.mode);
    box.scrollTop = 0;
    if (!state.info.count[state.filter]) state.filter = "all";
    drawTools();
    filter(state.filter);
    key.replaceChildren(...legend(passage, state.info, state.mode));
    choose(mostTelling(passage), { focus: false });
  }

  const matches = (i) => state.filter === "all" || state.info.fate[i] === state.filter || state.info.kind[i] === state.filter;
  const last = () => state.passage.student.text.length - 1;
  function walk(from, by) {
    for (let i = from; i >= 0 && i <= last(); i += by) if (matches(i)) return i;
    return state.active;
  }
  // the nearest token in the line above or below
  function line(by) {
    const here = text.span(state.active).getBoundingClientRect();
    for (let i = state.active + by; i >= 0 && i <= last() && Math.abs(i - state.active) <= 400; i += by) {
      const there = text.span(i).getBoundingClientRect();
      if (by > 0 ? there.top >= here.bottom && there.right > here.left : there.bottom <= here.top && there.left <= here.left) return walk(i, by);
    }
    return state.active;
  }
  const MOVES = {
    ArrowRight: () => walk(state.active + 1, 1), ArrowLeft: () => walk(state.active - 1, -1),
    ArrowDown: () => line(1), ArrowUp: () => line(-1),
    Home: () => walk(0, 1), End: () => walk(last(), -1),
  };

  // one listener for all tokens
  const at = (event) => Number(event.target.closest?.(".t")?.dataset.i ?? -1);
  const on = (name, act) => box.addEventListener(name, (event) => { const i = at(event); if (i >= 0) act(i); });
  on("mouseover", (i) => { inspector.show(state.passage, state.info, i); rows.highlight(i); });
  on("click", (i) => choose(i));
  on("focusin", (i) => { if (i !== state.active) choose(i, { focus: false }); });
  box.addEventListener("mouseleave", () => { inspector.show(state.passage, state.info, state.active); rows.highlight(state.active); });
  box.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !MOVES[event.key]) return;
    event.preventDefault();
    choose(MOVES[event.key]());
  });
  element.mount = () => show(page.passages[0]);
  return element;
}

// The page opens on a token worth a look: the largest excess, or the widest range, near the top.
function mostTelling(passage) {
  const values = passage.excess ? passage.excess.slice(0, 120) : (lead(passage)?.last || []).slice(0, 120).map((end, i) => end - lead(passage).first[i]);
  let best = 0;
  values.forEach((value, i) => { if (isNumber(value) && !(value <= (values[best] ?? -Infinity))) best = i; });
  return best;
}
