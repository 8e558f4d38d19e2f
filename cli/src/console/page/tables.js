// Tables, and the views of tenants, the queue and quotas.
"use strict";

// A table whose rows become cards in narrow windows: `wide` ones earlier than the others.
function table(titles, id, size) {
  const numbers = ["Memory", "GPU time", "in use", "Whole GPUs", "Shares", "Partitions", "Pods", "Pending", "Waits"];
  // The pods of a claim are names.
  const isNumber = (title) => numbers.includes(title) && !(title === "Pods" && titles[0] === "Claim");
  return el("div", { class: `table ${size ?? ""}` }, el("table", { role: "table" },
    el("thead", {}, el("tr", { role: "row" }, titles.map((title) => el("th", { scope: "col", role: "columnheader", class: isNumber(title) ? "number" : null }, title)))),
    el("tbody", { id })));
}

const row = (...cells) => el("tr", { role: "row" }, cells);
const head = (...children) => el("th", { scope: "row", role: "rowheader" }, children);

// A cell with the title of its column, which a card shows.
function cell(title, ...children) {
  const isEmpty = children.every((child) => child === "" || child === null || child === undefined);
  return el("td", { role: "cell", "data-title": title, class: isEmpty ? "none" : null }, isEmpty ? "–" : children);
}

function number(title, ...children) {
  const element = cell(title, ...children);
  element.classList.add("number");
  return element;
}

function rowsOr(id, items, columns, empty, key, render) {
  if (items.length > 0) return sync(byId(id), items, key, render);
  return sync(byId(id), [empty], () => "none", () => row(el("td", { class: "empty", colSpan: columns }, empty)));
}

const meter = (value, color) => el("span", { class: "meter", "aria-hidden": "true" }, el("span", { style: { width: `${Math.min(100, value)}%`, background: color } }));

function drawTenants(main) {
  const words = filterWords();
  const total = ui.model.totals.memory.total;
  const tenants = ui.model.tenants
    .filter((tenant) => words.every((word) => tenant.namespace.toLowerCase().includes(word)))
    .sort((a, b) => b.memory - a.memory || a.namespace.localeCompare(b.namespace, "en", { numeric: true }));
  frame(main, "tenants", () => [
    table(["Namespace", "Memory, % of the cluster", "GPU time", "Whole GPUs", "Shares", "Partitions", "Pods", "Pending", "Quota"], "tenants", "wide"),
    el("div", { id: "more-tenants" }),
  ]);
  drawResult(words.length > 0, `${tenants.length.toLocaleString("en")} of ${plural(ui.model.tenants.length, "tenant")}`);
  drawMore(byId("more-tenants"), "tenants", tenants.length, "tenant");
  // The bar is the part of the cluster's memory that the text names.
  const memory = (tenant) => (total > 0
    ? [meter(percent(tenant.memory, total), hue(tenant.namespace)), el("span", {}, bytes(tenant.memory)), el("small", {}, `${rounded(percent(tenant.memory, total))}%`)]
    : [el("span", {}, bytes(tenant.memory)), el("small", {}, "as shares")]);
  rowsOr("tenants", drawn(tenants, "tenants"), 9, ui.model.tenants.length > 0 ? "No tenant matches the filter." : "No namespace has GPUs or waits for them.",
    (tenant) => tenant.namespace, (tenant) => {
      const amount = cell("Memory", el("span", { class: "metered" }, memory(tenant)));
      amount.classList.add("meter-cell");
      return row(
        head(swatch(tenant.namespace), tenant.namespace), amount,
        number("GPU time", tenant.cores > 0 ? gpuTime(tenant.cores) : ""),
        number("Whole GPUs", count(tenant.whole)), number("Shares", count(tenant.shares)), number("Partitions", count(tenant.partitions)), number("Pods", count(tenant.pods)),
        number("Pending", tenant.pending ? el("a", { class: "chip pending", href: "#queue", onclick: () => setFilter(tenant.namespace) }, count(tenant.pending)) : ""),
        cell("Quota", tenant.quotas.join(", ")));
    });
}

const count = (value) => (value ? value.toLocaleString("en") : "");

// Texts for pods without a reason.
const QUEUE_STATES = {
  Feasible: "being allocated", Allocated: "being bound", Gated: "gated", Waiting: "waits", Unknown: "undecided",
};

// The code by which the model counts a pod.
const codeOf = (pod) => pod.reason ?? pod.state;
const codeText = (code) => QUEUE_STATES[code] ?? code;

// The text without the code before it, which the chip says.
const textOf = (pod) => (pod.summary.startsWith(`${pod.reason}: `) ? pod.summary.slice(pod.reason.length + 2) : pod.summary);

// Rows of the queue: a gang is one row, at the place of its oldest member.
function queueRows(pods) {
  const rows = new Map();
  for (const pod of pods) {
    const key = pod.gang === undefined ? `pod ${pod.namespace}/${pod.pod}` : `gang ${pod.namespace}/${pod.gang}`;
    if (rows.has(key)) rows.get(key).pods.push(pod);
    else rows.set(key, { key, pods: [pod] });
  }
  return [...rows.values()];
}

// Texts with their numbers, each once.
function counted(texts) {
  const counts = new Map();
  for (const text of texts) counts.set(text, (counts.get(text) ?? 0) + 1);
  return [...counts];
}

function queueRow({ pods }) {
  const [first] = pods;
  const isGang = first.gang !== undefined;
  const waits = number("Waits", age(first.created));
  if (first.created !== undefined) waits.firstChild.replaceWith(el("span", { "data-created": String(first.created) }, age(first.created)));
  const requests = counted(pods.flatMap((pod) => pod.requests)).map(([text, number]) => el("div", {}, number > 1 ? `${number} × (${text})` : text));
  const codes = counted(pods.map(codeOf)).map(([code]) => pods.find((pod) => codeOf(pod) === code));
  const why = codes.map((pod) => {
    const ofCode = pods.filter((other) => codeOf(other) === codeOf(pod)).length;
    return el("div", {},
      el("span", { class: `chip ${pod.state.toLowerCase()}` }, codeText(codeOf(pod)), isGang && codes.length > 1 ? ` (${ofCode})` : ""),
      el("span", {}, textOf(pod)),
      (pod.reserved ?? []).length > 0 ? el("small", {}, ` Reserved for the pod: ${pod.reserved.join(", ")}.`) : null);
  });
  const name = isGang
    ? el("details", {}, el("summary", {}, el("span", { class: "namespace" }, `${first.namespace}/`), first.gang, el("span", { class: "chip" }, `gang, ${plural(pods.length, "pod")}`)),
      el("ul", {}, pods.map((pod) => el("li", {}, pod.pod, codes.length > 1 ? el("small", {}, ` ${codeText(codeOf(pod))}`) : null))))
    : el("span", {}, el("span", { class: "namespace" }, `${first.namespace}/`), first.pod);
  return row(head(el("span", { class: "pod" }, swatch(first.namespace), name)), waits, cell("Requests", requests), el("td", { class: "why", role: "cell" }, why));
}

function drawQueue(main) {
  const words = filterWords();
  const pods = ui.model.queue.filter((pod) => (!ui.code || codeOf(pod) === ui.code) && words.every((word) =>
    [pod.namespace, pod.pod, codeText(codeOf(pod)), pod.summary, pod.gang, ...pod.requests].join(" ").toLowerCase().includes(word)));
  frame(main, "queue", () => [
    el("div", { class: "reasons", id: "reasons" }), table(["Pod", "Waits", "Requests", "Reason"], "pods"), el("div", { id: "more-pods" }),
  ]);
  drawResult(words.length > 0 || ui.code !== null, `${pods.length.toLocaleString("en")} of ${plural(ui.model.queue.length, "pod")}`);
  sync(byId("reasons"), ui.model.reasons, (reason) => reason.code + (ui.code === reason.code), (reason) => el("button", {
    type: "button", class: "reason", "aria-pressed": String(ui.code === reason.code), title: reason.meaning,
    onclick: () => { ui.code = ui.code === reason.code ? null : reason.code; draw(); },
  }, el("b", {}, reason.pods.toLocaleString("en")), el("span", {}, codeText(reason.code)), el("small", {}, reason.meaning)));
  const rows = queueRows(pods);
  drawMore(byId("more-pods"), "pods", rows.length, "row");
  const empty = isHidden("pods") ? "Pods are not visible to you." : ui.model.queue.length > 0 ? "No pod matches the filter." : "No pod waits for a GPU.";
  rowsOr("pods", drawn(rows, "pods"), 4, empty, (item) => item.key, queueRow);
}

const QUOTA_NAMES = { memory: "Memory", cores: "GPU time", devices: "Devices" };

function drawQuotas(main) {
  const words = filterWords();
  const quotas = ui.model.quotas.filter((quota) => words.every((word) => [quota.quota, ...quota.namespaces].join(" ").toLowerCase().includes(word)));
  frame(main, "quotas", () => [el("div", { class: "quotas", id: "quota-list" }), el("div", { id: "more-quotas" })]);
  drawResult(words.length > 0, `${quotas.length.toLocaleString("en")} of ${plural(ui.model.quotas.length, "quota")}`);
  drawMore(byId("more-quotas"), "quotas", quotas.length, "quota");
  if (quotas.length === 0) {
    sync(byId("quota-list"), ["none"], String, () => el("p", { class: "empty" }, isHidden("gpuquotas") ? "GpuQuotas are not visible to you."
      : ui.model.quotas.length > 0 ? "No quota matches the filter." : "No GpuQuota exists: namespaces use GPUs without limits."));
    return;
  }
  sync(byId("quota-list"), drawn(quotas, "quotas"), (quota) => quota.quota, (quota) => {
    const resources = quota.resources.filter((resource) => resource.limit !== undefined || resource.guarantee !== undefined);
    return el("section", { class: "quota", "aria-label": `Quota ${quota.quota}` },
      el("h2", {}, quota.quota),
      el("p", { class: "namespaces" }, quota.namespaces.length ? quota.namespaces.map((name) => el("span", {}, swatch(name), name)) : "no namespaces"),
      resources.map(quotaResource));
  });
}

function quotaResource(resource) {
  const amount = { memory: bytes, cores: gpuTime, devices: (devices) => devices.toLocaleString("en") }[resource.resource];
  const top = Math.max(1, resource.limit ?? 0, resource.guarantee ?? 0, resource.used);
  const guaranteed = Math.min(resource.used, resource.guarantee ?? resource.used);
  const isOver = resource.limit !== undefined && resource.used >= resource.limit;
  const texts = [
    `${amount(resource.used)} used`,
    resource.limit === undefined ? "no limit" : `limit ${amount(resource.limit)}`,
    resource.guarantee === undefined ? null : `guarantee ${amount(resource.guarantee)}`,
    resource.borrowed ? `${amount(resource.borrowed)} borrowed` : null,
  ].filter(Boolean);
  return el("div", { class: "resource" },
    el("div", { class: "resource-head" }, el("span", {}, QUOTA_NAMES[resource.resource]),
      el("b", { class: isOver ? "over" : "" }, resource.limit === undefined ? "" : `${rounded(percent(resource.used, resource.limit))}%`)),
    el("div", { class: "quota-bar", role: "img", "aria-label": texts.join(", ") },
      el("span", { class: `used${isOver ? " over" : ""}`, style: { width: `${percent(guaranteed, top)}%` } }),
      el("span", { class: "borrowed", style: { width: `${percent(resource.used - guaranteed, top)}%` } }),
      resource.used > resource.limit ? el("i", { class: "limit", title: `limit ${amount(resource.limit)}`, style: { left: `${percent(resource.limit, top)}%` } }) : null,
      resource.guarantee === undefined ? null : el("i", { title: `guarantee ${amount(resource.guarantee)}`, style: { left: `${percent(resource.guarantee, top)}%` } })),
    el("small", {}, texts.join(" · ")));
}
