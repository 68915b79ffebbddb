// What a page gains with a script: it stays current, charts can be read with pointer and keys,
// tables sort and filter in place, and the theme can be chosen. Everything works without it.
// Foreign text goes into the page through textContent only, or in markup that our server escaped.

const body = document.body;
const base = body.dataset.base ?? "";
const byId = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// ---- theme -------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];
let theme = THEMES.includes(recall("theme")) ? recall("theme") : "system";

function recall(key) {
  try { return localStorage.getItem(`dugnad-${key}`); } catch { return null; }
}

function showTheme() {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = byId("theme");
  if (!button) return;
  button.hidden = false;
  button.textContent = `Theme: ${theme}`;
}

byId("theme")?.addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("dugnad-theme", theme); } catch { /* private window: for this page */ }
  showTheme();
});
showTheme();

// ---- numbers and times -------------------------------------------------------------------------

const SIZES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const three = (v) => v.toFixed(Math.abs(v) >= 100 ? 0 : Math.abs(v) >= 10 ? 1 : 2);

function amount(value) {
  for (const [size, letter] of SIZES) {
    if (Math.abs(value) >= size) return `${three(value / size)} ${letter}`;
  }
  return Number.isInteger(value) ? String(value) : three(value);
}

function span(seconds) {
  const s = Math.max(Math.floor(seconds), 0);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  return s < 86400 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
}

// The reader's clock may be wrong: differences count from the newest time that the server named.
let skew = 0;
const now = () => Date.now() - skew;

function tick() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    if (time.textContent.endsWith(" ago")) {
      time.textContent = `${span((now() - Date.parse(time.dateTime)) / 1000)} ago`;
    }
  }
  for (const due of document.querySelectorAll("[data-due]")) {
    const left = (Number(due.dataset.due) - now()) / 1000;
    due.textContent = left >= 1 ? `in ${span(left)}` : "due now";
  }
}

function set(name, text) {
  for (const place of document.querySelectorAll(`[data-live="${name}"]`)) {
    if (place.textContent === text) continue;
    place.textContent = text;
    if (calm.matches) continue;
    place.classList.remove("fresh");
    requestAnimationFrame(() => place.classList.add("fresh"));
  }
}

// ---- live --------------------------------------------------------------------------------------

const stale = byId("stale");
const STALE_MS = 1000 * Number(stale?.dataset.after ?? 60);
const REFRESH_MS = 15000; // whole parts; single numbers come at once
const SOON_MS = 1000; // somebody came or went
const RETRY_MS = 15000; // where the browser gives up: a proxy said that the server is not there
let heard = 0;
let connected = true;
let place = body.dataset.place ?? ""; // of what is shown, in the news
let due = 0;

// How old the news on a page was when the server made it, and by how much our clocks differ.
function freshness(page) {
  const age = 1000 * Number(page.querySelector("#stale")?.dataset.age ?? 0);
  const moment = page.querySelector("#as-of")?.dateTime;
  heard = Math.max(heard, Date.now() - age);
  if (!moment) return;
  skew = Date.now() - Date.parse(moment) - age;
  byId("as-of")?.setAttribute("datetime", moment);
}
freshness(document);

// The words change when the state does, not each second: a screen reader speaks them.
function showStale() {
  if (!stale || !source) return;
  const late = !connected || Date.now() - heard > STALE_MS;
  const since = `${new Date(heard - skew).toISOString().slice(11, 19)} UTC`;
  const words = connected ? `Nothing new: stale since ${since}.`
    : `Connection lost: stale since ${since}. Trying again by itself.`;
  if (late && stale.textContent !== words) stale.textContent = words;
  stale.hidden = !late;
}

function told(event) {
  heard = Date.now();
  connected = true;
  place = event.lastEventId || place;
  showStale();
  if (!event.data) return;
  const news = JSON.parse(event.data);
  if (news.at_ms) {
    skew = Date.now() - news.at_ms;
    const time = byId("as-of");
    if (time) time.dateTime = new Date(news.at_ms).toISOString();
  }
  if (news.type === "throughput") set("speed", `${amount(news.tokens_per_s)}/s`);
  if (news.type === "held_out_loss") set("held", news.loss.toFixed(3));
  if (news.type === "head") set("tokens", amount(news.tokens_total));
  if (news.type === "merge_due") {
    for (const tile of document.querySelectorAll("[data-due]")) {
      if (Number(tile.dataset.due) <= now()) tile.dataset.due = news.due_ms;
    }
  }
  const soon = ["peer_seen", "peer_gone", "happened", "units_moved", "ended"].includes(news.type);
  schedule(soon ? SOON_MS : REFRESH_MS);
}

function schedule(wait) {
  const at = Date.now() + wait * (0.8 + 0.4 * Math.random()); // readers do not ask all at once
  due = due ? Math.min(due, at) : at;
}

async function refresh() {
  due = 0;
  let page;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (!answer.ok) return;
    page = new DOMParser().parseFromString(await answer.text(), "text/html");
  } catch { connected = false; return; }
  freshness(page);
  for (const part of document.querySelectorAll("[data-part]")) {
    const fresh = page.querySelector(`[data-part="${part.dataset.part}"]`);
    if (fresh && !part.contains(document.activeElement)) part.replaceWith(fresh);
  }
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const fresh = page.querySelector(`figure[data-chart="${figure.dataset.chart}"]`);
    if (fresh) redraw(figure, fresh);
  }
  const log = document.querySelector("[data-part=log] li");
  const live = page.querySelector('[data-live="live"]')?.textContent;
  if (live) set("live", live);
  if (log && !calm.matches) log.classList.add("fresh");
  filterRows();
}

// Take over a drawing, its key and its numbers; what somebody is using stays as it is.
function redraw(figure, fresh) {
  const used = document.activeElement !== figure && figure.contains(document.activeElement);
  if (used || figure.querySelector("details")?.open) {
    const drawings = fresh.querySelectorAll("svg.chart");
    figure.querySelectorAll("svg.chart").forEach((old, n) => drawings[n] && old.replaceWith(drawings[n]));
  } else {
    const kept = (one) => (one.matches(".readout, .choices") && figure.querySelector(`.${one.className}`)) || one;
    figure.replaceChildren(...[...fresh.children].map(kept));
  }
  if (figure.dataset.at) read(figure, Number(figure.dataset.at), false);
}

let source = null;

function listen() {
  source = new EventSource(`${base}/api/v1/events?after=${encodeURIComponent(place)}`);
  source.onmessage = told;
  source.onopen = () => { connected = true; showStale(); };
  source.addEventListener("reset", (event) => {
    place = event.lastEventId;
    schedule(2 * SOON_MS);
  });
  source.onerror = () => {
    connected = false;
    showStale();
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, RETRY_MS);
  };
}

if (body.dataset.base !== undefined && document.querySelector("[data-part], figure[data-chart]")) {
  listen();
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
}
setInterval(() => {
  tick();
  showStale();
  if (due && Date.now() >= due && !document.hidden) refresh();
}, 1000);

// ---- reading a chart ---------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

// The vertices of a curve in drawing units: M, L, H and V with absolute numbers is all we draw.
function vertices(path) {
  const points = [];
  let x = 0, y = 0;
  for (const [, verb, a, b] of path.getAttribute("d").matchAll(/([MLHV])(-?[\d.]+)(?: (-?[\d.]+))?/g)) {
    if (verb === "H") x = Number(a);
    else if (verb === "V") y = Number(a);
    else { x = Number(a); y = Number(b); }
    points.push([x, y]);
  }
  return points;
}

function shown(figure) {
  return [...figure.querySelectorAll("svg[data-plot]")].find((svg) => svg.getClientRects().length);
}

function valueAt(svg, x, y) {
  const [left, top, right, bottom] = svg.dataset.plot.split(" ").map(Number);
  const [x0, x1, y0, y1] = svg.dataset.range.split(" ").map(Number);
  const up = (bottom - y) / (bottom - top);
  const value = svg.dataset.log === "1" ? y0 * (y1 / y0) ** up : y0 + (y1 - y0) * up;
  return [x0 + ((x1 - x0) * (x - left)) / (right - left), value];
}

// Put the cursor at `share` (0 to 1) of the plot's width; say the values there if `aloud`.
function read(figure, share, aloud = true) {
  const svg = shown(figure);
  if (!svg) return;
  figure.dataset.at = share;
  const [left, top, right, bottom] = svg.dataset.plot.split(" ").map(Number);
  const want = left + share * (right - left);
  svg.querySelectorAll(".cursor, .cursor-dot").forEach((old) => old.remove());
  const words = [];
  let where = null;
  for (const path of svg.querySelectorAll("path[data-label]")) {
    const points = vertices(path);
    const step = path.dataset.kind === "step";
    const before = points.filter((p) => p[0] <= want).at(-1) ?? points[0];
    const near = step ? [want, before[1]]
      : points.reduce((a, b) => (Math.abs(b[0] - want) < Math.abs(a[0] - want) ? b : a));
    const [x, value] = valueAt(svg, near[0], near[1]);
    where ??= x;
    words.push(`${path.dataset.label} ${step ? Math.round(value) : three(value)}`);
    add(svg, "circle", { class: "cursor-dot", cx: near[0], cy: near[1], r: 3.5 });
  }
  if (!words.length) return;
  add(svg, "path", { class: "cursor", d: `M${want} ${top}V${bottom}` });
  const place = svg.dataset.axis === "time"
    ? `${new Date(where).toISOString().replace("T", " ").slice(0, 19)} UTC`
    : `${amount(where)} tokens`;
  if (aloud) say(figure, `${place}: ${words.join(", ")} ${svg.dataset.unit}`);
}

function add(svg, name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  svg.append(made);
}

const KEYS = "Arrow keys read values, Home and End jump, Escape ends.";

function say(figure, words) {
  const readout = figure.querySelector(".readout");
  if (readout) readout.textContent = words;
}

function unread(figure) {
  delete figure.dataset.at;
  figure.querySelectorAll(".cursor, .cursor-dot").forEach((old) => old.remove());
  say(figure, "");
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  figure.addEventListener("pointermove", (event) => {
    const svg = event.target.closest("svg[data-plot]");
    if (!svg) return;
    const box = svg.getBoundingClientRect();
    const [left, , right] = svg.dataset.plot.split(" ").map(Number);
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    read(figure, Math.min(Math.max((x - left) / (right - left), 0), 1));
  });
  figure.addEventListener("pointerleave", () => unread(figure));
  figure.addEventListener("focus", () => {
    if (figure.matches(":focus-visible") && figure.querySelector("path[data-label]")) say(figure, KEYS);
  });
  figure.addEventListener("blur", () => unread(figure));
  figure.addEventListener("keydown", (event) => {
    if (event.target !== figure) return;
    const moves = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: 0.1, PageDown: -0.1 };
    const at = Number(figure.dataset.at ?? 1);
    const to = event.key === "Home" ? 0 : event.key === "End" ? 1 : at + (moves[event.key] ?? NaN);
    if (event.key === "Escape") unread(figure);
    if (Number.isNaN(to)) return;
    event.preventDefault();
    read(figure, Math.min(Math.max(to, 0), 1));
  });
}

// Axis and scale change in place; the address changes too, so that it can be shared.
for (const link of document.querySelectorAll("a[data-choice]")) {
  link.addEventListener("click", async (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.replaceState(null, "", link.href);
    await refresh();
    markChoices();
  });
}

// Each link leads to one choice; which it is follows from the address that is shown now.
function markChoices() {
  const here = new URL(location.href).searchParams;
  const x = here.get("x") ?? "tokens", y = here.get("y") ?? "linear";
  for (const link of document.querySelectorAll("a[data-choice]")) {
    const url = new URL(link.href), own = link.textContent;
    const current = own === x || own === y;
    url.searchParams.set("x", own === "tokens" || own === "time" ? own : x);
    url.searchParams.set("y", own === "linear" || own === "log" ? own : y);
    link.href = url.href;
    if (current) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

// ---- tables, copying ---------------------------------------------------------------------------

// Typing narrows the rows that are here at once; after a pause the server is asked for all of them.
const field = document.querySelector("[data-filter]");
const TYPED_MS = 400;
let typing = 0;

function filterRows() {
  const typed = field && field.value !== field.defaultValue ? field.value : ""; // else the server did
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of document.querySelectorAll("[data-rows] tbody tr")) {
    const text = field ? `${row.textContent} ${row.querySelector("[title]")?.title}`.toLowerCase() : "";
    row.hidden = !words.every((word) => text.includes(word));
  }
}

async function askFiltered() {
  const asked = field.value, url = new URL(location.href);
  if (asked) url.searchParams.set("q", asked);
  else url.searchParams.delete("q");
  url.searchParams.delete("page");
  history.replaceState(null, "", url);
  await refresh();
  field.defaultValue = asked;
  filterRows();
}

field?.addEventListener("input", () => {
  filterRows();
  clearTimeout(typing);
  typing = setTimeout(askFiltered, TYPED_MS);
});

// Sorting a table is a link; with the script it is fetched without leaving the page.
document.addEventListener("click", async (event) => {
  const link = event.target.closest?.("th[scope=col] a");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const name = link.textContent.replace(/[ ▲▼]+$/, "");
  const asked = new URL(link.href).searchParams;
  for (const hidden of document.querySelectorAll(".filter input[type=hidden]")) {
    hidden.value = asked.get(hidden.name) ?? hidden.value; // so that a search keeps this order
  }
  link.blur();
  history.replaceState(null, "", link.href);
  await refresh();
  [...document.querySelectorAll("th[scope=col] a")].find((a) => a.textContent.startsWith(name))?.focus();
});

for (const button of document.querySelectorAll("[data-copy]")) {
  if (!navigator.clipboard) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(byId(button.dataset.copy).textContent);
    button.textContent = "Copied";
  });
}
