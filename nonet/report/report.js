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

  const reward = (t) => (t.reward === null ? "not scored" : "reward " + t.reward);
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
    const facts = [t.where, t.id, t.domain, t.effort && "effort " + t.effort, reward(t), t.status, t.stop && "stopped by: " + t.stop,
      count(t.policy, "policy token"), t.harness && "harness " + t.harness];
    at("facts").textContent = facts.filter(Boolean).join(" \u00b7 ");
    const versions = [...new Set(t.s.filter((s) => s[0] === "m").map((s) => s[1]))].sort((a, b) => a - b);
    const hue = (v) => "var(--v" + (versions.indexOf(v) % 8) + ")";
    legend(t, versions, hue);
    const nodes = [];
    for (const [author, version, pieces, logprobs] of t.s) {
      nodes.push(make("span", "tag", author === "m" ? "v" + version : AUTHOR[author]));
      pieces.forEach((piece, i) => {
        const node = make("span", "tok " + author);
        if (author === "m") node.style.setProperty("--v", hue(version));
        node.append(...glyphs(piece));
        node.about = { author, version, piece, logprob: logprobs[i] };
        nodes.push(node);
      });
    }
    if (t.cut) nodes.push(make("span", "tag", count(t.cut, "more token") + " not shown"));
    tokens = nodes.filter((node) => node.about);
    at("tokens").replaceChildren(...nodes);
    at("tokens").scrollTop = 0;
    at("about").textContent = "Choose a token to see who wrote it and its log-prob.";
    mark();
  }

  function legend(t, versions, hue) {
    const rows = ["p", "t"].filter((a) => t.s.some((s) => s[0] === a)).map((a) => [a, AUTHOR[a], ""]);
    for (const v of versions) rows.push(["m", "policy version " + v, hue(v)]);
    at("authors").replaceChildren(...rows.map(([css, label, v]) => {
      const item = make("li"), swatch = make("span", "swatch " + css);
      if (v) swatch.style.setProperty("--v", v);
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
    const { author, version, piece, logprob } = node.about;
    const words = ["token " + (place + 1) + " of " + tokens.length, JSON.stringify([...piece].map((c) => (c !== "\n" && c !== "\t" && ODD.test(c) ? spelled(c)[0] : c)).join("")),
      author === "m" ? "policy version " + version : AUTHOR[author]];
    if (author === "m") {
      words.push(typeof logprob === "number"
        ? "log-prob " + logprob.toFixed(3).replace("-", "\u2212") + " (probability " + Math.exp(logprob).toPrecision(3) + ")"
        : "no log-prob recorded");
    }
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
  at("viewer").hidden = false;
  current = all.reduce((best, t) => (t.versions > best.versions ? t : best));
  list(true);
})();
