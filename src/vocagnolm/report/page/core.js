// Elements, numbers, and text made safe to look at. Nothing here ever parses HTML.

const page = JSON.parse(document.getElementById("data").textContent);
for (const name of ["passages", "preflight", "runs", "notes"]) page[name] = page[name] || [];
page.environment = page.environment || {};
for (const passage of page.passages) passage.teachers = passage.teachers || [];
for (const run of page.runs) for (const name of ["loss", "facts", "environment"]) run[name] = run[name] || (name === "loss" ? [] : {});

function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(2)) if (child !== undefined && child !== null) element.append(child);
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, String(value));
  for (const child of children.flat()) if (child !== undefined && child !== null) element.append(child);
  return element;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const whole = new Intl.NumberFormat("en").format;
const MINUS = "\u2212";

function fixed(value, digits = 2) {
  if (!isNumber(value)) return "–";
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? MINUS + text : text;
}
const signed = (value, digits = 2) => (isNumber(value) && value > 0 ? "+" : "") + fixed(value, digits);

function percent(share) {
  if (!isNumber(share)) return "–";
  const value = 100 * share;
  if (value > 0 && value < 0.01) return "< 0.01 %";
  if (value > 99.99 && value < 100) return "> 99.99 %"; // a rounded 100 % would hide what is missing
  const digits = value === 0 || value === 100 ? 0 : value < 10 || value > 99 ? 2 : 1;
  return value.toFixed(digits) + " %";
}

// Numbers of any size on an axis or in a read-out.
function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return fixed(value / 1e9, 1) + "G";
  if (size >= 1e6) return fixed(value / 1e6, 1) + "M";
  if (size >= 1e4) return fixed(value / 1e3, size >= 1e5 ? 0 : 1) + "k";
  if (size >= 100 || Number.isInteger(value)) return fixed(value, 0);
  if (size >= 0.01 || size === 0) return fixed(value, size >= 10 ? 1 : size >= 1 ? 2 : 3);
  return value.toExponential(1).replace("-", MINUS);
}

// Characters that would be invisible, or would move their neighbours, get a visible name. A lone
// U+DC80..U+DCFF is a byte that is no character on its own.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\u{e0000}-\u{e007f}]/u;
const NAMES = {
  0x0a: "↵", 0x0d: "␍", 0x09: "⇥", 0x7f: "␡", 0xad: "SHY", 0x61c: "ALM", 0x200b: "ZWSP", 0x200c: "ZWNJ",
  0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM", 0x2028: "LS", 0x2029: "PS", 0x202a: "LRE", 0x202b: "RLE",
  0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO", 0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI",
  0x2069: "PDI", 0xfeff: "BOM",
};

function nameOf(code) {
  if (NAMES[code]) return NAMES[code];
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code >= 0xdc80 && code <= 0xdcff) return (code - 0xdc00).toString(16).toUpperCase();
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

const mark = (text, chip) => h("span", { class: chip ? "mk chip" : "mk" }, text);

// Puts a token's text into an element: plain text as one text node, the rest as marks.
// `breaks`: a line feed also breaks the line, but with `open` not the very last one. `spaces`: show
// every blank (for small boxes).
function showToken(element, text, { breaks = false, open = false, spaces = false, limit = 120 } = {}) {
  let cut = text;
  let left = 0;
  if (text.length > limit) {
    const points = Array.from(text);
    cut = points.slice(0, limit).join("");
    left = points.length - limit;
  }
  const blank = /^\s*$/u.test(cut);
  if (cut === "") {
    element.append(mark("∅"));
  } else if (!HIDDEN.test(cut) && !blank && !spaces) {
    element.append(cut);
  } else {
    let run = "";
    const flush = () => { if (run) element.append(run); run = ""; };
    let at = 0;
    for (const char of cut) {
      const code = char.codePointAt(0);
      at += char.length;
      if (HIDDEN.test(char)) {
        flush();
        const name = nameOf(code);
        element.append(mark(name, name.length > 1));
        if (code === 0x0a && breaks && !(open && at === cut.length)) element.append("\n");
      } else if (char === " " && (spaces || blank)) {
        flush();
        element.append(mark("·"));
      } else run += char;
    }
    flush();
  }
  if (left > 0) element.append(mark(`+${whole(left)}`, true));
  return element;
}

// The same as one string, for labels that are read aloud.
const spoken = (text) => Array.from(text.slice(0, 80)).map((c) => (HIDDEN.test(c) ? nameOf(c.codePointAt(0)) : c === " " ? "␣" : c)).join("");

// A setting has one colour on the whole page.
const COLOUR_COUNT = 6;
const settingOf = (run) => run.setting || run.method || run.name;
const coloured = [...new Set([...page.runs.map(settingOf), ...(page.results?.groups || []).map((group) => group.name), ...page.runs.map((run) => run.name)])];
const colourOf = (name) => coloured.indexOf(name) % COLOUR_COUNT;

function section(id, title, caption) {
  const element = h("section", { id, "aria-labelledby": id + "-title" }, h("h2", { id: id + "-title" }, title));
  if (caption) element.append(h("p", { class: "caption" }, caption));
  return element;
}
