// The page: reads the model (`view.json`) after each change, draws the selected view, and handles keys.
"use strict";

const filterWords = () => ui.filter.toLowerCase().split(/\s+/).filter(Boolean);

function setFilter(text) {
  byId("filter").value = text;
  ui.filter = text;
  draw();
}

function stat(title, value, detail, bar) {
  return el("div", { class: "stat" }, el("span", { class: "stat-title" }, title), el("strong", {}, value), bar ?? el("span", { class: "stack", "aria-hidden": "true" }), el("small", {}, detail));
}

function drawSummary() {
  const { totals, queue, reasons, limits, own } = ui.model;
  const full = (amount) => meter(percent(amount.allocated, amount.total), "var(--accent)");
  const stats = [];
  if (isHidden("resourceslices")) {
    const sum = (amount) => own.reduce((total, gpu) => total + (gpu[amount].allocated ?? 0), 0);
    stats.push(
      stat("Your GPUs", own.length.toLocaleString("en"), "the others are not visible to you"),
      stat("Memory", bytes(sum("memory")), "of shares"),
      stat("GPU time", gpuTime(sum("cores")), "of shares, guaranteed"));
  } else {
    const gpus = Object.values(totals.gpus).reduce((sum, number) => sum + number, 0);
    const states = Object.keys(STATES).filter((state) => totals.gpus[state] > 0);
    const split = el("span", { class: "stack", "aria-hidden": "true" }, states.map((state) => el("span", {
      class: state, style: { width: `${percent(totals.gpus[state], gpus)}%` },
    })));
    const idle = ["free", "reserved", "excluded", "unhealthy"].reduce((sum, state) => sum + (totals.gpus[state] ?? 0), 0);
    const faults = totals.gpus.unhealthy ? `, ${totals.gpus.unhealthy.toLocaleString("en")} unhealthy` : "";
    stats.push(
      stat("GPUs", gpus.toLocaleString("en"), `${(gpus - idle).toLocaleString("en")} in use by ${plural(totals.claims, "claim")}${limits.namespace === undefined ? "" : " of yours"}${faults}`, split),
      stat("Memory", `${rounded(percent(totals.memory.allocated, totals.memory.total))}%`, `${bytes(totals.memory.allocated)} of ${bytes(totals.memory.total)} allocated`, full(totals.memory)),
      stat("GPU time", `${rounded(percent(totals.cores.allocated, totals.cores.total))}%`, `${gpuTime(totals.cores.allocated).split(" ")[0]} of ${gpuTime(totals.cores.total)} allocated`, full(totals.cores)));
  }
  const unready = totals.nodes - totals.readyNodes;
  stats.push(
    isHidden("nodes") ? stat("Nodes", "–", "not visible to you")
      : stat("Nodes", totals.nodes.toLocaleString("en"), totals.nodes === 0 ? "none has GPUs" : unready === 0 ? "all ready" : `${unready.toLocaleString("en")} not ready or cordoned`, meter(percent(totals.readyNodes, totals.nodes), "var(--good)")),
    isHidden("pods") ? stat("Queue", "–", "not visible to you")
      : stat("Queue", queue.length.toLocaleString("en"), queue.length === 0 ? "no pod waits" : `most: ${codeText(reasons[0].code)}`));
  byId("summary").replaceChildren(...stats);
}

// Says how much of the view a filter shows. The summary is always that of the whole cluster.
function drawResult(isFiltered, text) {
  const result = byId("result");
  result.hidden = !isFiltered;
  if (!isFiltered || result.dataset.text === text) return;
  result.dataset.text = text;
  const clear = () => {
    Object.assign(ui, { state: null, code: null });
    setFilter("");
  };
  result.replaceChildren(el("b", {}, text), el("span", {}, " match the filter. The summary counts all."), el("button", { type: "button", onclick: clear }, "Clear filter"));
}

// What permissions hide is one notice; it stays open while the page is.
function drawNotices() {
  const { limits, notices } = ui.model;
  const title = limits.namespace === undefined ? "Your permissions hide parts of the cluster." : `Your permissions show namespace ${limits.namespace} only.`;
  const items = [
    ...(limits.details.length > 0 ? [{ title, details: limits.details }] : []),
    ...notices.map((text) => ({ title: text })),
  ];
  sync(byId("notices"), items, (item) => item.title, (item) => (item.details
    ? el("div", { class: "notice" }, el("details", {}, el("summary", {}, item.title), el("ul", {}, item.details.map((text) => el("li", {}, text)))))
    : el("p", { class: "notice fault" }, item.title)));
}

function draw() {
  if (!ui.model) return;
  const { model } = ui;
  byId("source").textContent = model.source.kind === "dump" ? "recorded state" : model.source.context;
  for (const [id, count] of [["tenants", model.tenants.length], ["queue", model.queue.length], ["quotas", model.quotas.length]]) {
    byId(`count-${id}`).textContent = count ? count.toLocaleString("en") : "";
  }
  for (const link of byId("views").children) {
    if (link.hash === `#${ui.view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  drawNotices();
  drawStatus();
  const main = byId("main");
  if (!model.isComplete) return;
  drawSummary();
  ({ gpus: drawGpus, tenants: drawTenants, queue: drawQueue, quotas: drawQuotas })[ui.view](main);
  if (byId("detail").open) drawDetail();
  document.documentElement.dataset.ready = `${ui.view} ${model.generation}`;
}

function drawStatus() {
  const status = byId("status");
  const [name, text] = ui.stale ? ["broken", "disconnected"]
    : ui.model?.source.kind === "dump" ? ["recorded", ""]
      : ui.model?.isStale ? ["broken", "reconnecting"] : ui.model?.isComplete ? ["live", "live"] : ["loading", "loading"];
  if (status.dataset.state === name && status.textContent === text) return;
  status.dataset.state = name;
  status.className = `status ${name}`;
  status.textContent = text;
}

let isReading = false;
let isDue = false;
async function read() {
  // One request at a time; changes in the meantime cause one more.
  if (isReading) { isDue = true; return; }
  isReading = true;
  try {
    const response = await fetch("view.json");
    if (!response.ok) throw new Error(String(response.status));
    ui.model = await response.json();
    const quotaOnly = ui.model.quotas.flatMap((quota) => quota.namespaces).map((namespace) => ({ namespace, memory: 0 }));
    const tenants = new Map([...quotaOnly, ...ui.model.tenants].map((tenant) => [tenant.namespace, tenant]));
    tenantColors = assignColors(tenants.values(), tenantColors);
    ui.stale = false;
    draw();
  } catch (error) {
    ui.stale = true;
    drawStatus();
    console.warn("cannot read the view:", error);
  } finally {
    isReading = false;
    if (isDue) { isDue = false; read(); }
  }
}

function route() {
  const name = location.hash.slice(1);
  if (!VIEWS.includes(name)) return;
  ui.view = name;
  draw();
}

// Moves the focus between the nodes of the map and of the list.
function move(key) {
  const items = [...document.querySelectorAll(".tile, .node .head")];
  const current = items.indexOf(document.activeElement);
  if (current < 0) return false;
  const box = items[current].getBoundingClientRect();
  let target;
  if (key === "ArrowLeft") target = items[current - 1];
  else if (key === "ArrowRight") target = items[current + 1];
  else {
    const isDown = key === "ArrowDown";
    const beyond = items.map((item) => [item, item.getBoundingClientRect()])
      .filter(([, other]) => (isDown ? other.top > box.top + 4 : other.top < box.top - 4));
    const distance = ([, other]) => Math.abs(other.top - box.top) * 100 + Math.abs(other.left - box.left);
    target = beyond.sort((a, b) => distance(a) - distance(b))[0]?.[0];
  }
  target?.focus();
  return true;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input")) {
    if (event.key === "Escape") { setFilter(""); event.target.blur(); }
    return;
  }
  if (byId("detail").open) return;
  const view = VIEWS[Number(event.key) - 1];
  if (view) location.hash = view;
  else if (event.key === "/") byId("filter").focus();
  else if (event.key === "m" && ui.view === "gpus") document.querySelector("[data-choice=layout] button[aria-pressed=false]")?.click();
  else if (!event.key.startsWith("Arrow") || !move(event.key)) return;
  event.preventDefault();
}

addEventListener("hashchange", route);
addEventListener("keydown", onKey);
byId("filter").addEventListener("input", (event) => { ui.filter = event.target.value; draw(); });
byId("detail").addEventListener("click", (event) => { if (event.target === byId("detail")) byId("detail").close(); });
setInterval(() => {
  for (const cell of document.querySelectorAll("[data-created]")) cell.textContent = age(Number(cell.dataset.created));
}, 10000);

route();
read();
const events = new EventSource("events");
events.addEventListener("message", (event) => { if (ui.stale || Number(event.data) !== ui.model?.generation) read(); });
events.addEventListener("error", () => { ui.stale = true; drawStatus(); });
