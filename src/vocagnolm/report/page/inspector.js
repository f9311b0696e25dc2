// One token in full: its losses, its rank, the teacher tokens that cover it, and what the teacher
// expected there.

function makeInspector() {
  const element = h("aside", { class: "card inspector", "aria-label": "The chosen token", "aria-live": "polite" });

  function meter(value, largest, name) {
    const share = isNumber(value) && largest > 0 ? Math.max(0, Math.min(1, value / largest)) : 0;
    return h("div", { class: "meter", "aria-hidden": "true" }, h("i", { class: name || "", vars: { "--w": (100 * share).toFixed(1) + "%" } }));
  }

  function stateBadge(passage, info, i) {
    const fate = info.fate[i] ? fateName(passage, info, i) : "";
    if (fate) return h("span", { class: "state " + info.fate[i] }, info.kind[i] === "un" ? `${fate}, unmapped` : fate);
    const names = { un: "unmapped", m11: "one to one", m1n: "one to several", mn1: "several to one" };
    return names[info.kind[i]] ? h("span", { class: "state" }, names[info.kind[i]]) : null;
  }

  function numbers(passage, i, largest) {
    const list = h("dl", { class: "numbers" });
    const row = (label, field, text, bar) => list.append(h("dt", {}, label), bar || h("span"), h("dd", { "data-field": field }, text));
    const student = passage.student.nll?.[i];
    const guidance = passage.guidance?.[i];
    const excess = passage.excess?.[i];
    if (passage.student.trained) row("trained on", "trained", passage.student.trained[i] || "no: it is context");
    if (passage.student.nll) row("student loss", "student", fixed(student), meter(student, largest, "student"));
    if (passage.guidance) row(`teacher (${carriedBy()})`, "guidance", fixed(guidance), meter(guidance, largest));
    if (passage.excess) {
      row("excess", "excess", signed(excess));
      if (isNumber(excess)) {
        const rank = rankOf(excess);
        list.append(h("dt", {}, "rank"), h("dd", { class: "full", "data-field": "rank" },
          h("span", {}, `${whole(rank)} of ${whole(excessDescending.length)} ·`), " ", h("span", {}, `top ${percent(rank / excessDescending.length)}`)));
      }
    }
    return list.childElementCount ? list : null;
  }

  function covers(passage, teacher, i, largest) {
    const several = passage.teachers.length > 1;
    const first = teacher.first[i];
    if (first < 0) return [h("p", { class: "small" }, several ? `No token of ${teacher.name} covers this one.` : "No teacher token covers this one.")];
    const losses = teacher.nll;
    const setter = maxSetter(teacher, i);
    const items = [];
    const shown = Math.min(teacher.last[i], first + 39);
    for (let t = first; t <= shown; t++) {
      const token = showToken(h("span", { class: "tok" }), teacher.text[t], { spaces: true, limit: 80 });
      items.push(h("li", { class: t === setter ? "sets" : "" }, token,
        losses ? meter(losses[t], largest) : h("span"), h("span", { class: "num" }, losses ? fixed(losses[t]) : "")));
    }
    const n = teacher.last[i] - first + 1;
    const owner = several ? ` of ${teacher.name}` : "";
    const title = owner ? `Covered by ${n === 1 ? "one token" : whole(n) + " tokens"}${owner}` : n === 1 ? "Covered by one teacher token" : `Covered by ${whole(n)} teacher tokens`;
    const rest = teacher.last[i] > shown ? h("p", { class: "small" }, `and ${whole(teacher.last[i] - shown)} more`) : null;
    return [h("h3", {}, title), h("ol", { class: "covers" }, items), rest];
  }

  // What the teacher expected where this token begins, and what the student makes of it.
  function expected(passage, info, number, i) {
    const teacher = passage.teachers[number];
    const at = teacher.first[i];
    const given = at < 0 ? null : teacher.alternatives?.[at];
    if (!given?.length) return [];
    const targets = teacher.targets?.[i] || [];
    const inside = info.studentStart[i] > info.teacherStart[number][at];
    const items = given.map(([text, p, follows], k) => {
      const became = h("span", { class: "became" });
      if (targets[k]) {
        const [target, share] = targets[k];
        // what has no token of its own is the label's: the token of the text
        const props = target === null ? { class: "tok label" } : { class: "tok", title: `${percent(share)} of the target` };
        became.append("→ ", showToken(h("span", props), target ?? passage.student.text[i], { spaces: true, limit: 40 }));
      } else became.append("–");
      return h("li", { class: follows ? "follows" : "" },
        showToken(h("span", { class: "tok" }), text, { spaces: true, limit: 40 }),
        meter(p, 1), h("span", { class: "num" }, percent(p)), became);
    });
    const several = passage.teachers.length > 1 ? ` by ${teacher.name}` : "";
    const notes = [];
    if (inside) notes.push("From where the teacher's token begins, before this one.");
    notes.push(given.some((one) => one[2]) ? "Bold: what the text goes on with." : "What the text goes on with is not among them.");
    if (!targets.length) notes.push("None counts for this token, which is taught its own text alone.");
    else {
      notes.push(page.selection?.method === "distill" ? "After the arrow: the student's token that is taught for it." : "After the arrow: the student's token that distillation would teach for it.");
      if (targets.includes(null)) notes.push("–: ruled out by the text between.");
    }
    return [h("h3", {}, `Expected here${several}`), h("ol", { class: "covers expected", "data-field": "expected" }, items), h("p", { class: "small" }, notes.join(" "))];
  }

  function show(passage, info, i) {
    const row = passage.student;
    const range = passage.teachers.flatMap((t) => (t.nll && t.first[i] >= 0 ? t.nll.slice(t.first[i], t.last[i] + 1) : []));
    const largest = Math.max(0.01, ...[row.nll?.[i], passage.guidance?.[i], ...range].filter(isNumber));
    const start = info.studentStart[i];
    const facts = [`token ${whole(i + 1)} of ${whole(row.text.length)}`];
    if (row.ids) facts.push(`id ${row.ids[i]}`);
    facts.push(row.length[i] === 0 ? "no text" : `byte ${whole(start)}, ${whole(row.length[i])} long`);
    element.replaceChildren(...[
      stateBadge(passage, info, i),
      showToken(h("div", { class: "big", "data-field": "token" }), row.text[i], { spaces: true, limit: 400 }),
      h("p", { class: "where" }, facts.join(" · ")),
      numbers(passage, i, largest),
      ...passage.teachers.flatMap((teacher, number) => [...covers(passage, teacher, i, largest), ...expected(passage, info, number, i)]),
    ].filter(Boolean));
  }

  return { element, show };
}

// How the teachers' losses became one number for a token.
function carriedBy() {
  const rule = page.selection || {};
  if (rule.compare === "stretch") return "stretch";
  if (rule.method === "chunk" && rule.chunk_choice === "teacher") return "mean of its chunk";
  return [rule.aggregation || "max", rule.combine].filter(Boolean).join(", ");
}

// With Phi = max one teacher token sets the guidance; -1 when it cannot be told.
function maxSetter(teacher, i) {
  const losses = teacher.nll;
  if (!losses || carriedBy() !== "max" || teacher.first[i] < 0) return -1;
  let best = -1;
  for (let t = teacher.first[i]; t <= teacher.last[i]; t++) if (isNumber(losses[t]) && (best < 0 || losses[t] > losses[best])) best = t;
  return best;
}
