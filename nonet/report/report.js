"use strict";
// The trajectory reader. Every string from the run enters the page as text, never as markup.
(() => {
  const all = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const make = (tag, css, text) => {
    const node = document.createElement(tag);
    if (css) node.className = css;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const AUTHOR = { p: "prompt", m: "policy", t: "tool" };
  const filters = {
    domain: { any: "all domains", of: (t) => t.domain, name: (v) => v },
    effort: { any: "any effort", of: (t) => t.effort, name: (v) => v || "none" },
    reward: { any: "any reward", of: grade, name: (v) => v },
    versions: { any: "any number", of: (t) => String(t.versions), name: (v) => (v === "1" ? "1 version" : v + " versions") },
    where: { any: "all steps", of: (t) => t.where, name: (v) => v },
  };
  let visible = all;
  let current = null;
  let tokens = [];
  let place = -1;

  function grade(t) {
    if (t.reward === null) return "not scored";
    return t.reward <= 0 ? "0 or less" : t.reward >= 1 ? "1 or more" : "between 0 and 1";
  }

  function fill(key) {
    const select = at("f-" + key), filter = filters[key];
    select.append(new Option(filter.any, ""));
    const values = [...new Set(all.map(filter.of))];
    if (key !== "where") values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    for (const v of values) select.append(new Option(filter.name(v), v));
    select.addEventListener("change", () => list(true));
  }

  const reward = (t) => (t.reward === null ? "not scored" : "reward " + String(t.reward).replace("-", "\u2212"));
  const count = (n, word) => n.toLocaleString("en") + " " + word + (n === 1 ? "" : "s");

  function list(choose) {
    visible = all.filter((t) => Object.keys(filters).every((k) => {
      const wanted = at("f-" + k).value;
      return wanted === "" || filters[k].of(t) === wanted;
    }));
    at("count").textContent = visible.length + " of " + all.length + " shown";
    at("list").replaceChildren(...visible.map((t) => {
      const item = make("li"), button = make("button", "", t.task);
      button.type = "button";
      button.append(make("small", "", [t.domain, t.where, reward(t), count(t.versions, "version"), count(t.policy, "token")].join(" \u00b7 ")));
      button.addEventListener("click", () => open(t));
      item.append(button);
      return item;
    }));
    if (choose && visible.length) open(visible.includes(current) ? current : visible[0]);
    mark();
  }

  function mark() {
    [...at("list").children].forEach((item, i) => {
      const here = visible[i] === current;
      item.firstChild.setAttribute("aria-current", String(here));
      if (!here) return;
      const box = at("list"), top = item.offsetTop - box.offsetTop;
      if (top < box.scrollTop || top + item.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top - 8;
    });
    const row = visible.indexOf(current);
    at("previous").disabled = row <= 0;
    at("next").disabled = row < 0 || row >= visible.length - 1;
  }

  function open(t) {
    current = t;
    place = -1;
    at("task").textContent = t.task;
    const facts = [t.where, t.id, t.domain, t.effort && "effort " + t.effort, reward(t) + parts(t),
      t.trained === null ? "" : t.trained ? "trained" : "not trained", t.status, t.stop && "stopped by: " + t.stop,
      count(t.policy, "policy token"), t.harness && "harness " + t.harness];
    at("facts").textContent = facts.filter(Boolean).join(" \u00b7 ");
    const nodes = [];
    const value = (column, i) => (Array.isArray(column) ? column[i] : column) ?? null;
    for (const [author, version, pieces, ...columns] of t.s) {
      nodes.push(make("span", "tag", author === "m" ? "v" + version : AUTHOR[author]));
      pieces.forEach((piece, i) => {
        const node = make("span", "tok " + author);
        node.append(...glyphs(piece));
        const [logprob, advantage, ratio] = columns.map((column) => value(column, i));
        node.about = { author, version, piece, logprob, advantage, ratio };
        nodes.push(node);
      });
    }
    if (t.cut) nodes.push(make("span", "tag", count(t.cut, "more token") + " not shown"));
    tokens = nodes.filter((node) => node.about);
    at("tokens").replaceChildren(...nodes);
    at("tokens").scrollTop = 0;
    at("about").textContent = "Choose a token to see who wrote it and its log-prob.";
    shade();
    mark();
  }

  // A reward that is not simply its one part is spelled out.
  const parts = (t) => (t.rewards.length > 1 || (t.rewards[0] && t.rewards[0][0] === "over_budget")
    ? " (" + t.rewards.map(([name, v]) => name + " " + signed(v)).join(", ") + ")" : "");
  const signed = (x) => (x > 0 ? "+" : "") + String(Math.round(x * 1000) / 1000).replace("-", "\u2212");

  // What policy tokens are shaded by: a hue, a strength from 0 to 1 (null: the plain tint), rows of the legend.
  const SHADES = {
    version: { name: "policy version" },
    logprob: { name: "log-prob", full: 5, rows: [["unlikely when sampled", 1]] },
    advantage: { name: "advantage", full: 0, rows: [["advantage above zero", 0], ["below zero", 1]] },
    ratio: { name: "teacher log-ratio", full: 3, rows: [["teacher finds it likelier than the student", 0], ["less likely", 1]] },
  };

  function shade() {
    const policy = tokens.filter((node) => node.about.author === "m");
    const has = (key) => key === "version" || policy.some((node) => node.about[key] !== null);
    for (const option of at("f-shade").options) option.disabled = !has(option.value);
    const wanted = at("f-shade").value, key = has(wanted) ? wanted : "version", { full, rows } = SHADES[key];
    const versions = [...new Set(policy.map((node) => node.about.version))].sort((a, b) => a - b);
    const most = full || Math.max(1e-9, ...policy.map((node) => Math.abs(node.about[key] ?? 0)));
    for (const node of policy) {
      const x = key === "version" ? null : node.about[key] ?? 0;
      const hue = x === null ? versions.indexOf(node.about.version) % 8 : x < 0 ? 1 : 0;
      node.style.setProperty("--v", "var(--v" + hue + ")");
      if (x === null) node.style.removeProperty("--tint");
      else node.style.setProperty("--tint", String(0.55 * Math.min(1, Math.abs(x) / most)));
      node.classList.toggle("bare", x !== null);
    }
    legend(rows ?? versions.map((v) => ["policy version " + v, versions.indexOf(v) % 8]));
  }

  function legend(hues) {
    const rows = ["p", "t"].filter((a) => current.s.some((s) => s[0] === a)).map((a) => [AUTHOR[a], null, a]);
    at("authors").replaceChildren(...[...rows, ...hues].map(([label, hue, css]) => {
      const item = make("li"), swatch = make("span", "swatch " + (css ?? "m"));
      if (hue !== null) swatch.style.setProperty("--v", "var(--v" + hue + ")");
      item.append(swatch, label);
      return item;
    }));
  }

  // Newlines and tabs stay, and show; other control and direction characters are spelled out.
  const ODD = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/u;
  function spelled(c) {
    if (c === "\n") return ["\u21b5", "\n"];
    if (c === "\t") return ["\u21e5", "\t"];
    return ["\u27e8" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "\u27e9", ""];
  }
  function glyphs(piece) {
    if (piece === "") return [make("span", "glyph", "\u2205")];
    const out = [];
    let plain = "";
    for (const c of piece) {
      if (!ODD.test(c)) { plain += c; continue; }
      const [shown, kept] = spelled(c);
      out.push(plain, make("span", "glyph", shown), kept);
      plain = "";
    }
    out.push(plain);
    return out.filter((part) => part !== "");
  }

  function tell(node) {
    if (tokens[place]) tokens[place].classList.remove("now");
    place = tokens.indexOf(node);
    node.classList.add("now");
    const { author, version, piece, logprob, advantage, ratio } = node.about;
    const words = ["token " + (place + 1) + " of " + tokens.length, JSON.stringify([...piece].map((c) => (c !== "\n" && c !== "\t" && ODD.test(c) ? spelled(c)[0] : c)).join("")),
      author === "m" ? "policy version " + version : AUTHOR[author]];
    if (author === "m") {
      words.push(typeof logprob === "number"
        ? "log-prob " + logprob.toFixed(3).replace("-", "\u2212") + " (probability " + Math.exp(logprob).toPrecision(3) + ")"
        : "no log-prob recorded");
      if (typeof advantage === "number") words.push("in the loss, advantage " + signed(advantage));
      else if (current.trained === false) words.push("not in the loss");
      if (typeof ratio === "number") words.push("teacher log-ratio " + signed(ratio));
    } else if (current.trained !== null) words.push("not in the loss");
    at("about").textContent = words.join(" \u00b7 ");
  }

  const under = (event) => event.target.closest(".tok");
  at("tokens").addEventListener("pointerover", (e) => { const node = under(e); if (node) tell(node); });
  at("tokens").addEventListener("click", (e) => { const node = under(e); if (node) tell(node); });
  at("tokens").addEventListener("keydown", (e) => {
    const move = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10 }[e.key];
    if (!move || !tokens.length) return;
    e.preventDefault();
    const node = tokens[Math.min(tokens.length - 1, Math.max(0, place + move))];
    tell(node);
    node.scrollIntoView({ block: "nearest" });
  });
  const turn = (by) => { const t = visible[visible.indexOf(current) + by]; if (t) open(t); };
  at("previous").addEventListener("click", () => turn(-1));
  at("next").addEventListener("click", () => turn(1));

  Object.keys(filters).forEach(fill);
  for (const [key, { name }] of Object.entries(SHADES)) at("f-shade").append(new Option(name, key));
  at("f-shade").addEventListener("change", shade);
  at("viewer").hidden = false;
  current = all.reduce((best, t) => (t.versions > best.versions ? t : best));
  list(true);
})();
