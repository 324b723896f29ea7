"""The page for a person, and the tree of prefixes it shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...meta import clean_excerpt
from ...types import Entry
from ...util.printable import printable

SHOWN = 2000


def tree(entries: Iterable[Entry], *, private: bool) -> list[dict[str, Any]]:
    """Entries under the prefix they are stored against, largest family first; excerpts only where `private`."""
    nodes: dict[int, dict[str, Any]] = {}
    parents: dict[int, int | None] = {}
    for entry in entries:
        node = entry.as_dict()
        node["excerpt"] = printable(clean_excerpt(entry.excerpt)) if private else None
        nodes[entry.id] = {**node, "children": []}
        parents[entry.id] = entry.parent
        if len(nodes) >= SHOWN:
            break
    roots: list[dict[str, Any]] = []
    for id, node in nodes.items():
        parent = parents[id]
        (roots if parent is None or parent not in nodes else nodes[parent]["children"]).append(node)
    for node in nodes.values():
        node["children"].sort(key=lambda n: n["last_used"], reverse=True)
    roots.sort(key=lambda n: (-len(n["children"]), n["family"], -n["last_used"]))
    return roots


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvstore</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --line: #8883; --dim: #777; --mark: #2a7; --bar: #2a72; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1.5rem; max-width: 72rem; }
h1 { font-size: 1.3rem; margin: 0; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
header { display: flex; flex-wrap: wrap; gap: .25rem 1rem; align-items: baseline; }
.dim { color: var(--dim); }
.off { color: #c33; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(14rem, 45%), 1fr)); gap: .75rem; margin: 1rem 0 0; }
dl div { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
dt { color: var(--dim); font-size: .8rem; }
dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
dd small { display: block; font-size: .75rem; color: var(--dim); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--dim); font-size: .8rem; }
th:first-child, td:first-child, .text { text-align: left; }
td.text { max-width: 22rem; overflow: hidden; text-overflow: ellipsis; }
.reuse { display: inline-block; width: 6rem; height: .6rem; background: var(--line); border-radius: .3rem; overflow: hidden; }
.reuse i { display: block; height: 100%; background: var(--mark); }
.learned { color: var(--mark); font-weight: 600; }
</style>
</head>
<body>
<header><h1>kvstore</h1><span id="model"></span><span id="state" class="dim" role="status">loading</span></header>
<dl id="figures"></dl>
<h2>Last requests</h2>
<div class="wide"><table><thead><tr><th>When</th><th class="text">Request</th><th>Slot</th><th>Prompt</th><th>Reused</th>
<th>From the store</th><th>Share</th><th>Restore</th></tr></thead><tbody id="recent"></tbody></table></div>
<h2>Prefixes</h2>
<div class="wide"><table><thead><tr><th>Entry</th><th class="text">Class</th><th>Tokens</th><th>State</th><th>Stored</th>
<th>Hits</th><th>Last used</th><th class="text">Starts with</th></tr></thead><tbody id="tree"></tbody></table></div>
<p id="hidden" class="dim" hidden>Texts are shown where the proxy has an API key.</p>
<script>
// What would turn a line around, or break it: control and format characters, lone surrogates, separators.
const UNSAFE = /[\\p{Cc}\\p{Cf}\\p{Cs}\\p{Zl}\\p{Zp}]/gu;
const clean = text => String(text).replace(UNSAFE, "\\ufffd");
const el = (tag, text, cls) => {
  const e = document.createElement(tag);
  if (text !== undefined && text !== null) e.textContent = clean(text);
  if (cls) e.className = cls;
  return e;
};
const bytes = n => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < 4) { n /= 1024; i++; }
  return (i && n < 100 ? n.toFixed(1) : Math.round(n)) + " " + units[i];
};
const count = n => Math.round(n).toLocaleString("en");
const duration = s => s < 60 ? s.toFixed(1) + " s" : s < 5400 ? (s / 60).toFixed(1) + " min" : (s / 3600).toFixed(1) + " h";
const ago = at => {
  const seconds = Date.now() / 1000 - at;
  return seconds < -60 ? "in the future" : duration(Math.max(0, seconds)) + " ago";
};
const row = cells => { const tr = el("tr"); tr.append(...cells); return tr; };
const none = (columns, text) => { const td = el("td", text, "dim"); td.colSpan = columns; return row([td]); };

function figures(s) {
  const by = s.requests_by_source, st = s.store;
  const all = [
    ["Hit rate", (100 * s.hit_rate).toFixed(1) + " %", "of prompt tokens not computed again"],
    ["Tokens reused", count(s.cached_tokens), count(s.restored_tokens) + " of them from the store"],
    ["Time saved", duration(s.saved_seconds), "by " + s.restores + " restores, which took " + duration(s.restore_seconds)],
    ["Requests", count(s.requests),
      by.store + " store, " + by.slot + " slot, " + by.computed + " computed; " + s.passed + " passed"],
    ["Saves", count(s.saves), s.saves_skipped + " left out"],
    ["Failures", count(s.failures), s.restores_failed + " restores refused"],
  ];
  if (st) {
    const n = Object.values(st.entries).reduce((a, b) => a + b, 0);
    all.push(["Entries", count(n), (st.entries.learned || 0) + " learned"]);
    all.push(["On disk", bytes(st.file_bytes), bytes(st.size) + " of states stored in " + bytes(st.stored)]);
  }
  return all.map(([name, value, note]) => {
    const div = el("div"), dd = el("dd", value);
    dd.append(el("small", note));
    div.append(el("dt", name), dd);
    return div;
  });
}

function recent(r) {
  const share = r.prompt_tokens ? r.cached_tokens / r.prompt_tokens : 0;
  const bar = el("span", null, "reuse"), fill = el("i"), td = el("td");
  fill.style.width = 100 * share + "%";
  bar.title = (100 * share).toFixed(0) + " %";
  bar.append(fill);
  td.append(bar);
  return row([el("td", ago(r.at)), el("td", r.excerpt ?? r.path, "text"), el("td", r.slot), el("td", count(r.prompt_tokens)),
    el("td", count(r.cached_tokens)), el("td", count(r.restored_tokens)), td,
    el("td", r.restore_ms ? r.restore_ms.toFixed(0) + " ms" : "")]);
}

function entries(nodes, depth) {
  return nodes.flatMap(n => {
    const id = el("td", n.id);
    id.style.paddingLeft = 0.6 + 1.4 * depth + "rem";
    return [row([id, el("td", n.class, "text " + n.class), el("td", count(n.n_tokens)), el("td", bytes(n.bytes)),
      el("td", bytes(n.stored_bytes)), el("td", n.hits), el("td", ago(n.last_used)), el("td", n.excerpt ?? "", "text")]),
      ...entries(n.children, depth + 1)];
  });
}

async function load() {
  const state = document.getElementById("state");
  try {
    const s = await (await fetch("stats", {cache: "no-store"})).json();
    document.getElementById("model").textContent = clean(s.model ?? "");
    state.textContent = clean(s.caching ? "in front of " + s.upstream : "no caching: " + s.off);
    state.className = s.caching ? "dim" : "off";
    document.getElementById("hidden").hidden = s.private;
    document.getElementById("figures").replaceChildren(...figures(s));
    const last = s.recent.map(recent), all = entries(s.prefixes, 0);
    document.getElementById("recent").replaceChildren(...(last.length ? last : [none(8, "no requests yet")]));
    document.getElementById("tree").replaceChildren(...(all.length ? all : [none(8, "nothing is stored yet")]));
  } catch (error) {
    state.textContent = "the proxy does not answer";
    state.className = "off";
  }
  setTimeout(load, document.hidden ? 15000 : 3000);
}
load();
</script>
</body>
</html>
"""
