
"use strict";
// Everything that comes from the job is set as text (textContent, createTextNode), never as markup.

const QUIET_MS = 25000; // the stream brings a sign of life each 10 s
const $ = (id) => document.getElementById(id);
const LOST_MS = 2000; // a stream may be renewed without a word about it
let board = null, behind = 0, source = null, heard = Date.now(), lost = 0, shown = {};

function h(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) node[key] = value;
  node.append(...children.flat().map((c) => (c instanceof Node ? c : document.createTextNode(String(c)))));
  return node;
}

function s(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
}

// -- words for numbers --------------------------------------------------------------------------

const now = () => Date.now() / 1000 - behind;

function duration(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  for (const [unit, smaller, size, small] of [["d", "h", 86400, 3600], ["h", "m", 3600, 60], ["m", "s", 60, 1]])
    if (seconds >= size) return `${Math.floor(seconds / size)}${unit} ${Math.floor((seconds % size) / small)}${smaller}`;
  return `${Math.floor(seconds)} s`;
}

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
}

function clock(seconds) {
  const date = new Date(seconds * 1000);
  if (isNaN(date)) return "?";
  const time = date.toLocaleTimeString([], {hour12: false});
  return now() - seconds > 43200 ? `${date.getMonth() + 1}-${date.getDate()} ${time}` : time;
}

const known = (value, show) => (value === null || value === undefined ? "–" : show(value));
const milliseconds = (seconds) => `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
const plural = (n, thing) => `${n} ${thing}${n === 1 ? "" : "s"}`;
const slug = (text) => text.replace(/[^a-z]+/g, "-");

// -- pictures -----------------------------------------------------------------------------------

const room = (id, least) => Math.max(least, $(id).clientWidth);

function sparkline(values, width, height) {
  const top = Math.max(...values, 1e-9);
  const x = (i) => (values.length < 2 ? width : (i * width) / (values.length - 1));
  const points = values.map((v, i) => `${x(i).toFixed(1)},${(height - 1 - (v / top) * (height - 3)).toFixed(1)}`);
  return s("svg", {width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": true},
    s("polyline", {points: points.join(" "), class: "curve"}));
}

function rateChart(rates) {
  const width = room("rate", 240), height = 84, left = 38, bottom = 14;
  if (rates.length < 2) return h("p", {className: "muted"}, "The members publish their step rate every few seconds.");
  const from = rates[0][0], to = Math.max(rates[rates.length - 1][0], from + 1);
  const top = Math.max(...rates.map((r) => r[1])) * 1.1 || 1;
  const x = (t) => left + ((t - from) / (to - from)) * (width - left - 2);
  const y = (v) => 4 + (1 - v / top) * (height - bottom - 6);
  const line = rates.map(([t, v]) => `${x(t).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
  const base = y(0);
  const label = (px, py, text, anchor) => {
    const node = s("text", {x: px, y: py, "text-anchor": anchor});
    node.textContent = text;
    return node;
  };
  const svg = s("svg", {width, height, role: "img"},
    s("line", {x1: left, x2: width, y1: base, y2: base, class: "axis"}),
    s("polygon", {points: `${left},${base} ${line} ${x(to)},${base}`, class: "area"}),
    s("polyline", {points: line, class: "curve"}),
    label(left - 5, y(top) + 8, top.toPrecision(2), "end"), label(left - 5, base, "0", "end"),
    label(left, height - 1, clock(from), "start"), label(width, height - 1, clock(to), "end"));
  svg.setAttribute("aria-label", `steps per second, last ${rates[rates.length - 1][1]}`);
  return svg;
}

function lanes(spans, moments) {
  const timed = spans.filter((e) => e.time > 0);
  if (!timed.length) return h("p", {className: "muted"}, "No epoch yet.");
  const names = [...new Set(timed.flatMap((e) => e.members))].sort().slice(0, 30);
  const end = Math.max(now(), timed[timed.length - 1].time + 1), from = timed[0].time;
  const width = room("lanes", 480), row = 20, left = 130, foot = 18, height = names.length * row + foot;
  const x = (t) => left + ((t - from) / (end - from)) * (width - left - 4);
  const svg = s("svg", {width, height, role: "img", "aria-label": "who was in which epoch"});
  const write = (px, py, text, anchor) => {
    const node = s("text", {x: px, y: py, "text-anchor": anchor});
    node.textContent = text;
    svg.append(node);
  };
  names.forEach((name, i) => write(left - 8, i * row + 14, name.length > 18 ? `${name.slice(0, 17)}…` : name, "end"));
  const deaths = moments.filter((m) => m.time && (m.event === "departed" || m.event === "vanished"));
  timed.forEach((epoch, i) => {
    const until = i + 1 < timed.length ? timed[i + 1].time : end;
    const span = (a, b) => Math.max(1, x(b) - x(a) - 1);
    for (const name of epoch.members) {
      const lane = names.indexOf(name);
      if (lane < 0) continue;
      const title = s("title");
      title.textContent = `epoch ${epoch.epoch}, ${plural(epoch.num_members, "member")}: ${epoch.reason}`;
      const died = deaths.find((m) => m.replica_id === name && m.time > epoch.time && m.time < until);
      svg.append(s("rect", {x: x(epoch.time), y: lane * row + 4, width: span(epoch.time, died ? died.time : until), height: row - 8,
        class: epoch.epoch % 2 ? "odd" : "even"}, title));
    }
    if (span(epoch.time, until) > 26) write(x(epoch.time) + span(epoch.time, until) / 2, height - 4, epoch.epoch, "middle");
  });
  for (const moment of moments) {
    const lane = names.indexOf(moment.replica_id);
    if (lane < 0 || !moment.time || moment.time < from || !["departed", "vanished", "joined"].includes(moment.event)) continue;
    const title = s("title");
    title.textContent = moment.text;
    svg.append(s("circle", {cx: x(moment.time), cy: lane * row + row / 2, r: 4,
      class: moment.event === "joined" ? "mark-join" : "mark-death"}, title));
  }
  return svg;
}

// -- parts of the page --------------------------------------------------------------------------

function figure(value, words) {
  return h("div", {className: "card"}, h("b", {}, value), h("small", {}, words));
}

function figures() {
  const rate = board.rates.length ? board.rates[board.rates.length - 1][1] : null;
  const inside = board.rows.filter((r) => r.rank !== null && r.steps_per_s !== null);
  const wait = inside.length ? Math.max(...inside.map((r) => r.wait_s || 0)) : null;
  const live = Object.entries(board.counts).reduce((n, [k, v]) => n + (k === "gone" || k === "suspect" ? 0 : v), 0);
  const age = board.epoch_time ? ` for ${duration(now() - board.epoch_time)}` : "";
  return [
    figure(board.epoch || "–", `epoch${age}${board.epoch_reason ? ` · ${board.epoch_reason}` : ""}`),
    figure(known(board.step, String), "step"),
    figure(known(rate, (r) => r.toFixed(2)), `steps/s${wait === null ? "" : ` · waits up to ${milliseconds(wait)} per step`}`),
    figure(live, `replica groups live · at least ${board.min_replicas} needed`),
  ];
}

function timeCell(row) {
  if (row.compute_s === null && row.wait_s === null) return h("td", {className: "muted"}, "–");
  const compute = row.compute_s || 0, wait = row.wait_s || 0, both = compute + wait || 1;
  const bar = h("span", {className: "time", title: `compute ${milliseconds(compute)}, wait ${milliseconds(wait)}`},
    h("i"), h("i"));
  [compute, wait].forEach((part, i) => { bar.children[i].style.width = `${(100 * part) / both}%`; });
  return h("td", {}, bar, `${milliseconds(compute)} + ${milliseconds(wait)}`);
}

function members() {
  if (!board.rows.length) return h("p", {className: "muted"}, "No replica group is running.");
  const head = [["rank", "num"], ["replica"], ["state"], ["step", "num"], ["steps/s", "num"], [""], ["compute + wait"],
    ["healed", "num"], ["process"], ["note"]];
  const rows = board.rows.map((r) => h("tr", {},
    h("td", {className: "num"}, known(r.rank, String)),
    h("td", {className: "name", title: r.replica_id}, r.replica_id),
    h("td", {}, h("span", {className: `dot s-${slug(r.state)}`}), r.state),
    h("td", {className: "num"}, known(r.step, String)),
    h("td", {className: "num"}, known(r.steps_per_s, (v) => v.toFixed(2))),
    h("td", {}, r.rates.length > 1 ? sparkline(r.rates, 72, 18) : ""),
    timeCell(r),
    h("td", {className: "num"}, r.bytes_healed ? size(r.bytes_healed) : "–"),
    h("td", {}, r.pid ? `${r.host}:${r.pid}` : "–"),
    h("td", {className: "note"}, r.note || r.phase)));
  const table = h("table", {}, h("thead", {}, h("tr", {}, head.map(([t, c]) => h("th", {className: c || ""}, t)))),
    h("tbody", {}, rows));
  const more = board.num_hidden ? [h("p", {className: "muted"}, `and ${board.num_hidden} more`)] : [];
  return h("div", {}, table, ...more);
}

function moments() {
  return h("ol", {}, [...board.moments].reverse().map((m) => h("li", {},
    h("time", {}, m.time ? clock(m.time) : "earlier"),
    h("span", {className: `dot e-${slug(m.event)}`, title: m.event}), h("span", {}, m.text))));
}

function rest() {
  const lists = [["Departed lately", board.departed], ["Requests not yet acknowledged", board.requests],
    ["Keys that cannot be read", board.broken]].filter(([, items]) => items.length);
  $("rest").hidden = !lists.length;
  return lists.flatMap(([title, items]) => [h("h2", {}, title), h("ul", {}, items.map((i) => h("li", {}, i)))]);
}

// What has not changed is left alone, so that text can be selected and lists keep their place.
function put(id, of, make) {
  const key = JSON.stringify(of);
  if (shown[id] === key) return;
  shown[id] = key;
  $(id).replaceChildren(...[make()].flat());
}

function banner(id, text) {
  $(id).hidden = !text;
  if ($(id).textContent !== text) $(id).textContent = text;
}

function show() {
  const quiet = Date.now() - heard > QUIET_MS || (lost && Date.now() - lost > LOST_MS);
  document.body.className = quiet ? "gone-quiet" : "";
  $("contact").textContent = board && !quiet ? "live" : "";
  if (quiet) banner("alarm", `The dashboard has not answered for ${duration((Date.now() - heard) / 1000)}; trying again.`);
  else banner("alarm", board && board.etcd_error ? `etcd: ${board.etcd_error}. Training goes on without it for a while; what is shown may be old.` : "");
  if (!board) return;
  document.title = `${board.job}: ${board.state}`;
  $("job").textContent = board.job;
  $("state").textContent = board.state;
  $("state").className = `pill ${board.state === "empty" && board.epoch ? "lost" : slug(board.state)}`;
  banner("reason", board.reason);
  $("counts").textContent = Object.entries(board.counts).map(([state, n]) => `${n} ${state}`).join(" · ");
  $("figures").replaceChildren(...figures());
  put("rate", [board.rates, $("rate").clientWidth], () => rateChart(board.rates));
  put("members", [board.rows, board.num_hidden], members);
  $("lanes").replaceChildren(lanes(board.spans, board.moments));
  put("moments", board.moments, moments);
  put("rest", [board.departed, board.requests, board.broken], rest);
}

// -- the stream ---------------------------------------------------------------------------------

function listen() {
  if (source || document.hidden) return;
  source = new EventSource("events");
  source.onmessage = (message) => {
    const told = JSON.parse(message.data);
    board = told.board;
    heard = Date.now();
    lost = 0;
    behind = heard / 1000 - told.at;
    show();
  };
  source.addEventListener("alive", () => { heard = Date.now(); lost = 0; });
  source.onerror = () => {
    lost = lost || Date.now();
    if (source && source.readyState === EventSource.CLOSED) { source = null; setTimeout(listen, 2000); }
  };
}

// Browsers allow six streams per server in all tabs together: one that nobody looks at gives its own back.
document.addEventListener("visibilitychange", () => {
  if (document.hidden && source) { source.close(); source = null; } else { heard = Date.now(); lost = 0; listen(); }
});
setInterval(() => { if (!document.hidden) show(); }, 1000);
listen();
