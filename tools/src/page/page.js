// The live page: draws the frames that come over server-sent events, and sends commands.
// Nothing is computed here that the frames do not say; without a frame nothing moves.
"use strict";

const SECONDS_SHOWN = 300; // the curves' length, as the demo keeps them
const CHART_HEIGHT = 118; // CSS pixels
const LANE_SQUARE = 11; // CSS pixels from one request to the next
const RATES = [1, 5, 10, 20, 30, 40, 60];
const LIMITS = [2, 4, 8, 16, 32];
const KINDS = { // decisions, in words and colours
  home: ["to the host its prompt belongs to", "#1f9d6b"],
  match: ["to a host that has more of it cached", "#2f8fd0"],
  divert: ["elsewhere because of load", "#c28a1f"],
  saturated: ["every host at its limit", "#b3261e"],
  reject: ["refused", "#b3261e"],
  abstain: ["left to Envoy", "#6b7280"],
};

const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const percent = (share) => (share === null ? "–" : `${Math.round(share * 100)} %`);
const ms = (value) => (value === null ? "–" : value >= 9950 ? `${(value / 1000).toFixed(0)} s` : `${Math.round(value)} ms`);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A prompt's colour: neighbours in popularity are far apart on the wheel. */
function colour(prefix) {
  if (prefix === null) return css("--soft");
  if (latest?.controls?.viral_prefix === prefix) return css("--bad");
  return `hsl(${(prefix * 137.508) % 360} ${55 + (prefix % 3) * 15}% ${css("--square-light")})`;
}

let latest = null;
let cards = [];

// ---- fleets -------------------------------------------------------------------------------

const FIGURES = [
  ["hits", "Found in caches", true],
  ["p50", "First token, median", true],
  ["p99", "slowest 1 %", false],
  ["rate", "requests/s", false],
  ["in_flight", "in flight", false],
  ["failed", "failed", false],
];

function card(index, fleet, count) {
  const figures = element("dl", { class: "figures" });
  const values = {};
  for (const [key, label, big] of FIGURES) {
    values[key] = element("dd", { "data-figure": key }, "–");
    figures.append(element("div", big ? { class: "big" } : {}, element("dt", {}, label), values[key]));
  }
  const body = element("tbody", {});
  const lane = element("th", { scope: "col", class: "lane" }, "In flight");
  const head = element("thead", {}, element("tr", {},
    element("th", { scope: "col", class: "name" }, "Host"),
    lane,
    element("th", { scope: "col", class: "number" }, ""),
    element("th", { scope: "col", class: "known" }, "Its prompts, 30 s"),
    element("th", { scope: "col", class: "number count" }, ""),
    element("th", { scope: "col", class: "number" }, "Cached")));
  const title = element("h2", { id: `fleet-${index}` });
  const decisions = element("div", { class: "decisions" });
  const own = fleet.filter ? 1 : count > 2 && index === 0 ? 2 : 0;
  const article = element("article", { class: `fleet own${own}`, "aria-labelledby": `fleet-${index}` },
    title, figures, element("table", { class: "hosts" }, head, body), decisions);
  return { article, title, values, body, lane, decisions, rows: [], own, prompts: [] };
}

const STAGES = { waiting: "has not begun", warm_up: "fills its caches", running: "", finished: "finished: the whole run" };

function showFleet(one, fleet) {
  one.article.classList.toggle("waiting", fleet.stage === "waiting");
  setText(one.title, STAGES[fleet.stage] ? `${fleet.title} (${STAGES[fleet.stage]})` : fleet.title);
  setText(one.lane, fleet.filter && fleet.limit ? `In flight (bar: the limit, ${fleet.limit})` : "In flight");
  const figures = fleet.figures;
  setText(one.values.hits, percent(figures.hits));
  setText(one.values.p50, ms(figures.p50));
  setText(one.values.p99, ms(figures.p99));
  setText(one.values.rate, figures.rate.toFixed(figures.rate < 10 ? 1 : 0));
  setText(one.values.in_flight, String(fleet.in_flight));
  setText(one.values.failed, String(figures.failed));
  one.values.failed.parentElement.classList.toggle("failing", figures.failed > 0);
  while (one.rows.length < fleet.hosts.length) one.rows.push(row(one));
  fleet.hosts.forEach((host, index) => showHost(one, one.rows[index], host, index, fleet));
  showDecisions(one, fleet);
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function row(one) {
  const name = element("th", { scope: "row", class: "name" });
  const lane = element("canvas", { "aria-hidden": "true" });
  const known = element("canvas", { "aria-hidden": "true" });
  const flight = element("td", { class: "number", "data-figure": "host-in-flight" });
  const cached = element("td", { class: "number", "data-figure": "host-hits" });
  const prompts = element("td", { class: "number count", "data-figure": "host-prompts" });
  const line = element("tr", {}, name, element("td", { class: "lane" }, lane), flight,
    element("td", { class: "known" }, known), prompts, cached);
  one.body.append(line);
  return { line, name, lane, known, flight, cached, prompts, seen: new Map() };
}

function showHost(one, shown, host, index, fleet) {
  shown.line.className = host.state;
  shown.line.dataset.address = host.address;
  shown.line.title = `${host.address}: ${host.in_flight} in flight, ${host.prompts} different prompts in 30 s`;
  const state = { up: "", draining: "drains", killed: "dead" }[host.state];
  if (shown.name.dataset.state !== host.state) {
    shown.name.dataset.state = host.state;
    shown.name.replaceChildren(`${index + 1} `, element("small", {}, state));
  }
  setText(shown.prompts, String(host.prompts));
  setText(shown.flight, String(host.in_flight));
  setText(shown.cached, percent(host.hits));
  placeRequests(shown, host, fleet);
  drawKnown(shown.known, one.prompts[index] || []);
}

/** A canvas made sharp; its context in CSS pixels. */
function surface(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const still = window.matchMedia("(prefers-reduced-motion: reduce)");

/** Requests fly in from the left and take their place; a request that ended leaves its place. */
function placeRequests(shown, host, fleet) {
  const now = performance.now();
  const seen = new Map();
  host.running.forEach(([id, prefix, answering], place) => {
    const before = shown.seen.get(id);
    seen.set(id, { prefix, answering, place, x: before ? before.x : null, since: before ? before.since : now });
  });
  shown.seen = seen;
  shown.limit = fleet.filter ? fleet.limit : null;
  shown.dead = host.state === "killed";
}

/** Every animation frame: squares move to their places. */
function paintLane(shown) {
  const { context, width, height } = surface(shown.lane);
  const step = Math.min(LANE_SQUARE, Math.max(3, (width - 4) / Math.max(shown.seen.size, Math.min(shown.limit || 0, 24) + 2)));
  const size = Math.max(2, Math.min(step - 2, 9));
  const top = (height - size) / 2;
  if (shown.dead) {
    context.strokeStyle = css("--bad");
    context.beginPath();
    context.moveTo(2, height / 2);
    context.lineTo(width - 2, height / 2);
    context.stroke();
  }
  if (shown.limit !== null && shown.limit !== undefined) {
    const x = 2 + shown.limit * step;
    context.fillStyle = css("--ink");
    context.fillRect(x, 2, 2, height - 4);
  }
  for (const square of shown.seen.values()) {
    const target = 2 + square.place * step;
    if (square.x === null) square.x = still.matches ? target : 0;
    square.x += (target - square.x) * (still.matches ? 1 : 0.25);
    context.strokeStyle = context.fillStyle = colour(square.prefix);
    context.lineWidth = 2;
    if (square.answering) context.fillRect(square.x, top, size, size);
    else context.strokeRect(square.x + 1, top + 1, size - 2, size - 2);
  }
}

function drawKnown(canvas, prompts) {
  const { context, width, height } = surface(canvas);
  const sliver = Math.min(6, width / Math.max(prompts.length, 1));
  prompts.forEach((prefix, place) => {
    context.fillStyle = colour(prefix);
    context.fillRect(place * sliver, height * 0.2, Math.max(sliver - (sliver > 3 ? 1 : 0), 0.6), height * 0.6);
  });
}

function showDecisions(one, fleet) {
  if (!fleet.filter) {
    setText(one.decisions, "Envoy’s own policy knows nothing of prompts: no decisions to count.");
    return;
  }
  const total = Object.values(fleet.decisions).reduce((sum, count) => sum + count, 0);
  const kinds = Object.keys(KINDS).filter((kind) => fleet.decisions[kind] > 0);
  const line = element("div", {}, total === 0 ? "No decisions yet." : "Decisions: ");
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  kinds.forEach((kind, index) => {
    const share = fleet.decisions[kind] / total;
    const [words, shade] = KINDS[kind];
    const number = element("b", { "data-decision": kind, "data-count": fleet.decisions[kind] }, `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`);
    const dot = element("span", { style: `color:${shade}`, "aria-hidden": "true" }, "■ ");
    line.append(index ? " · " : "", dot, number, ` ${words} (${kind})`);
    bar.append(element("i", { style: `width:${share * 100}%;background:${shade}` }));
  });
  one.decisions.replaceChildren(line, bar);
}

// ---- curves -------------------------------------------------------------------------------

let charts = null;
let series = null;

function chart(id, key, log) {
  const target = byId(id);
  const lines = cards.map((one, index) => ({
    label: latest.fleets[index].title,
    stroke: () => getComputedStyle(one.article).getPropertyValue("--own").trim(),
    width: 2,
    dash: latest.fleets[index].filter ? undefined : [6, 4],
    spanGaps: true,
    value: (_, value) => (value === null || value === undefined ? "–" : key === "hits" ? `${value.toFixed(0)} %` : `${value.toFixed(0)} ms`),
  }));
  const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--grid") }, ticks: { stroke: () => css("--grid") }, font: "12px system-ui" };
  const y = log
    ? { distr: 3, log: 2, range: (_, low, high) => [Math.min(16, low || 16), Math.max(1024, (high || 1) * 1.3)] }
    : { range: [0, 100] };
  const options = {
    width: target.clientWidth, height: CHART_HEIGHT, series: [{ label: "second", value: (_, t) => (t === null ? "–" : `${t.toFixed(0)}`) }, ...lines],
    scales: { x: { time: false, range: (_, low, high) => [low, Math.max(high, low + 30)] }, y },
    axes: [
      { ...axis, size: 26, values: (_, all) => all.map((t) => `${t} s`) },
      { ...axis, size: 52, values: (_, all) => all.map((value) => (value === null ? "" : `${value}`)) },
    ],
    legend: { live: false },
    cursor: { y: false },
    hooks: { draw: [drawNotes] },
  };
  const plot = new uPlot(options, data(key), target);
  const picture = plot.root.querySelector("canvas");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", target.parentElement.querySelector("figcaption").textContent + ", over time; the figures now are above.");
  return { plot, key, target };
}

/** All fleets' points on one time axis. */
function data(key) {
  const times = new Set();
  series.fleets.forEach((fleet) => fleet.points.forEach((point) => times.add(Math.round(point.t))));
  const axis = [...times].sort((a, b) => a - b).slice(-SECONDS_SHOWN);
  const columns = series.fleets.map((fleet) => {
    const known = new Map(fleet.points.map((point) => [Math.round(point.t), point[key]]));
    return axis.map((t) => {
      const value = known.get(t);
      return value === undefined || value === null ? null : key === "hits" ? value * 100 : value;
    });
  });
  return [axis, ...columns];
}

/** A line wherever something was changed. */
function drawNotes(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = css("--soft");
  ctx.setLineDash([2, 4]);
  for (const note of latest.notes) {
    if (note.t < plot.scales.x.min || note.t > plot.scales.x.max) continue;
    const x = Math.round(plot.valToPos(note.t, "x", true)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function showSeries() {
  if (!latest || !series || series.fleets.length !== cards.length) return;
  series.fleets.forEach((fleet, index) => { cards[index].prompts = fleet.prompts; });
  if (!charts) charts = [chart("chart-hits", "hits", false), chart("chart-ttft", "p50", true)];
  for (const { plot, key } of charts) plot.setData(data(key));
}

window.addEventListener("resize", () => {
  for (const { plot, target } of charts || []) plot.setSize({ width: target.clientWidth, height: CHART_HEIGHT });
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { plot } of charts || []) plot.redraw();
});

// ---- controls -----------------------------------------------------------------------------

async function command(body) {
  const said = byId("said");
  try {
    const response = await fetch("control", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
    said.classList.toggle("refused", !response.ok);
    if (!response.ok) said.textContent = `Refused: ${await response.text()}.`;
  } catch {
    said.classList.add("refused");
    said.textContent = "The demo does not answer.";
  }
}

function options(select, values, chosen, words) {
  const all = values.some((value) => value === chosen) ? values : [...values, chosen].sort((a, b) => a - b);
  const text = all.map((value) => `${value}`).join();
  if (select.dataset.options !== text) {
    select.dataset.options = text;
    select.replaceChildren(...all.map((value) => element("option", { value: `${value}` }, words(value))));
  }
  if (document.activeElement !== select || select.dataset.sent === `${chosen}`) {
    select.value = `${chosen}`;
    select.dataset.sent = "";
  }
}

let noted = -1;

function showControls(frame) {
  const controls = frame.controls;
  byId("controls").hidden = !controls;
  if (!controls) return;
  press("viral", controls.viral);
  press("unique", controls.unique);
  options(byId("rate"), RATES, controls.rate, (value) => `${value}`);
  options(byId("limit"), [...LIMITS, null], controls.limit, (value) => (value === null ? "none" : `${value}`));
  if (document.activeElement !== byId("opponent")) byId("opponent").value = controls.opponent;
  const hosts = byId("host");
  const count = frame.fleets[0].hosts.length;
  while (hosts.options.length < count) hosts.add(new Option(`${hosts.options.length + 1}`, `${hosts.options.length}`));
  byId("add").disabled = controls.hosts_left === 0;
  const last = frame.notes.at(-1);
  if (last && last.t !== noted) {
    noted = last.t;
    byId("said").classList.remove("refused");
    byId("said").textContent = last.text;
  }
}

function press(id, on) {
  byId(id).setAttribute("aria-pressed", `${on}`);
}

const pressed = (id) => byId(id).getAttribute("aria-pressed") === "true";

function listen() {
  byId("viral").addEventListener("click", () => command({ do: "viral", on: !pressed("viral") }));
  byId("unique").addEventListener("click", () => command({ do: "unique", on: !pressed("unique") }));
  byId("add").addEventListener("click", () => command({ do: "add" }));
  const change = (id, body) => byId(id).addEventListener("change", (event) => {
    event.target.dataset.sent = event.target.value;
    command(body(event.target.value));
  });
  change("rate", (value) => ({ do: "rate", value: Number(value) }));
  change("limit", (value) => ({ do: "limit", value: value === "null" ? null : Number(value) }));
  change("opponent", (value) => ({ do: "opponent", value }));
  for (const button of document.querySelectorAll("[data-host-do]")) {
    button.addEventListener("click", () => command({ do: button.dataset.hostDo, host: Number(byId("host").value) }));
  }
}

// ---- the stream ---------------------------------------------------------------------------

function show(frame) {
  latest = frame;
  setText(byId("about"), frame.about.join(" "));
  if (cards.length !== frame.fleets.length) {
    cards = frame.fleets.map((fleet, index) => card(index, fleet, frame.fleets.length));
    byId("fleets").replaceChildren(...cards.map((one) => one.article));
    if (frame.fleets.length > 2) document.querySelector("h1").textContent = "Same LLM requests, several ways to choose the engine";
  }
  frame.fleets.forEach((fleet, index) => showFleet(cards[index], fleet));
  showControls(frame);
  if (!charts) showSeries();
}

function paint() {
  for (const one of cards) for (const shown of one.rows) paintLane(shown);
  requestAnimationFrame(paint);
}

function start() {
  listen();
  const source = new EventSource("events");
  source.addEventListener("frame", (event) => { byId("gone").hidden = true; show(JSON.parse(event.data)); });
  source.addEventListener("series", (event) => { series = JSON.parse(event.data); showSeries(); });
  source.addEventListener("error", () => {
    byId("gone").hidden = false;
    byId("gone").textContent = "The demo has ended or cannot be reached: what you see is how it was last.";
  });
  requestAnimationFrame(paint);
}

start();
