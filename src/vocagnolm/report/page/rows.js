// The sentence of the chosen token as rows over one text: the student's and every teacher's, with a
// line from every student token to the first teacher's tokens that cover it. All rows share one
// horizontal axis: the text.

const SENTENCE_LIMIT = 28; // tokens shown on each side of the chosen one, at most
const LINKS_HEIGHT = 46;

function sentenceAround(passage, i) {
  const text = passage.student.text;
  const ends = (k) => /[\n\r]/.test(text[k]) || (/[.?!]["”’)]?$/.test(text[k]) && (k + 1 >= text.length || /^\s/.test(text[k + 1])));
  let from = i;
  let to = i;
  while (from > 0 && i - from < SENTENCE_LIMIT && !ends(from - 1)) from--;
  while (to < text.length - 1 && to - i < SENTENCE_LIMIT && !ends(to)) to++;
  return [from, to];
}

const ruler = document.createElement("canvas").getContext("2d");

function labelWidth(element) {
  ruler.font = getComputedStyle(element).font;
  return (text) => ruler.measureText(text).width;
}

// Widths for the pieces of text between all token boundaries, so that every label has room in
// its box and both rows stay aligned over the text.
function layout(boxes) {
  const cuts = [...new Set(boxes.flatMap((b) => [b.start, b.end]))].sort((a, b) => a - b);
  const place = new Map(cuts.map((cut, at) => [cut, at]));
  const width = new Array(Math.max(0, cuts.length - 1)).fill(0);
  const bySpan = [...boxes].sort((a, b) => (place.get(a.end) - place.get(a.start)) - (place.get(b.end) - place.get(b.start)));
  for (const box of bySpan) {
    const [from, to] = [place.get(box.start), place.get(box.end)];
    let have = 0;
    for (let k = from; k < to; k++) have += width[k];
    const lack = box.need - have;
    if (lack <= 0) continue;
    const bytes = box.end - box.start;
    for (let k = from; k < to; k++) width[k] += (lack * (cuts[k + 1] - cuts[k])) / bytes;
  }
  const x = [0];
  for (const w of width) x.push(x[x.length - 1] + w);
  for (const box of boxes) [box.left, box.right] = [x[place.get(box.start)], x[place.get(box.end)]];
  return x[x.length - 1];
}

function makeRows(choose) {
  const stage = h("div", { class: "stage" });
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "img", "aria-label": "The sentence in all tokenizations" }, stage);
  const element = h("div", { class: "card rows" }, h("h3", {}, page.passages.some((p) => p.teachers.length > 1) ? "The sentence in all vocabularies" : "The sentence in both vocabularies"), scroll);
  let shown = null; // { passage, from, to, mode, boxes, links }

  // a row's number: 0 is the student, then the teachers
  function makeBox(number, index, passage, info, mode) {
    const side = number ? "teacher" : "student";
    const row = number ? passage.teachers[number - 1] : passage.student;
    const box = h("div", { class: "box", "data-side": side, "data-row": number, "data-i": index });
    const label = showToken(h("span"), row.text[index], { spaces: true, limit: 24 });
    box.append(label);
    if (row.nll) box.append(h("span", { class: "v" }, fixed(row.nll[index])));
    if (side === "student") box.className = tokenClass(passage, info, index, mode).replace(/^t/, "box");
    else box.className = "box plain";
    const start = number ? info.teacherStart[number - 1][index] : info.studentStart[index];
    return { number, side, index, element: box, label, least: row.nll ? 38 : 14, start, end: start + row.length[index] };
  }

  function draw(passage, info, active, mode) {
    element.hidden = !passage.teachers.length;
    if (element.hidden) return;
    const inside = shown && shown.passage === passage && shown.mode === mode && active >= shown.from && active <= shown.to;
    if (!inside) build(passage, info, active, mode);
    highlight(active, true);
  }

  function build(passage, info, active, mode) {
    const [from, to] = sentenceAround(passage, active);
    const boxes = [];
    for (let i = from; i <= to; i++) if (passage.student.length[i] > 0) boxes.push(makeBox(0, i, passage, info, mode));
    passage.teachers.forEach((teacher, at) => {
      let low = Infinity;
      let high = -1;
      for (let i = from; i <= to; i++) if (teacher.first[i] >= 0) { low = Math.min(low, teacher.first[i]); high = Math.max(high, teacher.last[i]); }
      high = Math.min(high, low + 4 * SENTENCE_LIMIT);
      for (let t = low; t <= high; t++) if (teacher.length[t] > 0) boxes.push(makeBox(at + 1, t, passage, info, mode));
    });
    const lanes = [passage.student, ...passage.teachers].map(() => h("div", { class: "lane" }));
    const links = svg("svg", { class: "links", height: LINKS_HEIGHT, "aria-hidden": "true" });
    stage.replaceChildren(
      h("div", { class: "label" }, `Student · ${passage.student.name}`), lanes[0], links,
      ...passage.teachers.flatMap((teacher, at) => [lanes[at + 1], h("div", { class: "label" }, `Teacher · ${teacher.name}`)]),
    );
    stage.classList.toggle("bare", !passage.student.nll && !passage.teachers.some((teacher) => teacher.nll));
    for (const box of boxes) lanes[box.number].append(box.element);
    if (!boxes.length) { shown = { passage, from, to, mode, boxes, paths: [] }; return; }
    const measure = labelWidth(boxes[0].element);
    for (const box of boxes) box.need = Math.max(box.least, measure(box.label.textContent) + 14);
    const total = layout(boxes);
    stage.style.width = total + "px";
    links.setAttribute("width", total);
    for (const box of boxes) {
      box.element.style.left = box.left + 1.5 + "px";
      box.element.style.width = Math.max(6, box.right - box.left - 3) + "px";
    }
    const middle = [new Map(), new Map()];
    for (const box of boxes) middle[box.number]?.set(box.index, (box.left + box.right) / 2);
    const paths = [];
    const { first, last } = lead(passage);
    for (const [i, x] of middle[0]) {
      if (first[i] < 0) continue;
      const setter = maxSetter(lead(passage), i);
      for (let t = first[i]; t <= last[i]; t++) {
        const y = middle[1].get(t);
        if (y === undefined) continue;
        const path = svg("path", { d: `M${x.toFixed(1)} 2C${x.toFixed(1)} ${LINKS_HEIGHT * 0.55} ${y.toFixed(1)} ${LINKS_HEIGHT * 0.45} ${y.toFixed(1)} ${LINKS_HEIGHT - 2}`, "data-student": i, "data-teacher": t });
        paths.push({ i, t, path, sets: t === setter && first[i] < last[i] });
        links.append(path);
      }
    }
    shown = { passage, from, to, mode, boxes, paths };
  }

  function highlight(active, bring = false) {
    if (!shown || element.hidden) return;
    const { passage } = shown;
    for (const { i, path, sets } of shown.paths) path.setAttribute("class", i === active ? (sets ? "on sets" : "on") : "");
    for (const box of shown.boxes) {
      const teacher = passage.teachers[box.number - 1];
      const on = !teacher ? box.index === active : active >= 0 && teacher.first[active] >= 0 && box.index >= teacher.first[active] && box.index <= teacher.last[active];
      box.element.classList.toggle("on", on);
      if (on && bring && box.side === "student") {
        const middle = (box.left + box.right) / 2;
        if (box.left < scroll.scrollLeft || box.right > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = middle - scroll.clientWidth / 2;
      }
    }
  }

  stage.addEventListener("click", (event) => {
    const box = event.target.closest?.(".box");
    if (!box) return;
    const index = Number(box.dataset.i);
    if (box.dataset.side === "student") choose(index);
    else {
      const teacher = shown.passage.teachers[Number(box.dataset.row) - 1];
      const under = teacher.first.findIndex((first, i) => first >= 0 && first <= index && index <= teacher.last[i]);
      if (under >= 0) choose(under);
    }
  });
  return { element, draw, highlight };
}
