// Views of tenants, the queue and quotas.
"use strict";

function drawTenants(main) {
  const words = filterWords();
  const total = ui.model.totals.memory.total;
  const tenants = ui.model.tenants
    .filter((tenant) => words.every((word) => tenant.namespace.toLowerCase().includes(word)))
    .sort((a, b) => b.memory - a.memory || a.namespace.localeCompare(b.namespace));
  frame(main, "tenants", () => [table(["Namespace", "Memory", "GPU time", "Whole GPUs", "Shares", "Partitions", "Pods", "Pending", "Quota"], "tenants")]);
  const largest = Math.max(1, ...ui.model.tenants.map((tenant) => tenant.memory));
  rowsOr("tenants", tenants, 9, "No namespace has GPUs or waits for them.", (tenant) => tenant.namespace, (tenant) => el("tr", {},
    el("th", { scope: "row" }, swatch(tenant.namespace), tenant.namespace),
    el("td", { class: "meter-cell" }, meter(percent(tenant.memory, largest), hue(tenant.namespace)), bytes(tenant.memory),
      el("small", {}, ` ${rounded(percent(tenant.memory, total))}%`)),
    el("td", { class: "number" }, tenant.cores > 0 ? gpuTime(tenant.cores) : "–"),
    [tenant.whole, tenant.shares, tenant.partitions, tenant.pods].map((count) => el("td", { class: "number" }, count || "–")),
    el("td", { class: "number" }, tenant.pending ? el("a", { class: "chip pending", href: "#queue", onclick: () => setFilter(tenant.namespace) }, String(tenant.pending)) : "–"),
    el("td", {}, tenant.quotas.join(", ") || "–")));
}

const meter = (value, color) => el("span", { class: "meter", "aria-hidden": "true" }, el("span", { style: { width: `${value}%`, background: color } }));

function table(titles, id) {
  return el("div", { class: "table" }, el("table", {},
    el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title)))), el("tbody", { id })));
}

function rowsOr(id, items, columns, empty, key, render) {
  if (items.length > 0) return sync(byId(id), items, key, render);
  return sync(byId(id), [empty], () => "none", () => el("tr", {}, el("td", { class: "empty", colSpan: columns }, empty)));
}

const QUEUE_STATES = {
  Infeasible: "waits", Rejected: "rejected", Feasible: "being allocated", Allocated: "being bound", Gated: "gated",
  WaitingForClaim: "no claim",
};

function drawQueue(main) {
  const words = filterWords();
  const pods = ui.model.queue.filter((pod) => (!ui.reason || pod.reason === ui.reason) && words.every((word) =>
    [pod.namespace, pod.pod, pod.reason, pod.summary, pod.gang, ...pod.requests].join(" ").toLowerCase().includes(word)));
  frame(main, "queue", () => [el("div", { class: "reasons", id: "reasons" }), table(["Pod", "Waits", "Requests", "Reason"], "pods")]);
  sync(byId("reasons"), ui.model.reasons, (reason) => reason.code + ui.reason, (reason) => el("button", {
    type: "button", class: "reason", "aria-pressed": String(ui.reason === reason.code), title: reason.meaning,
    onclick: () => { ui.reason = ui.reason === reason.code ? null : reason.code; draw(); },
  }, el("b", {}, String(reason.pods)), el("span", {}, reason.code), el("small", {}, reason.meaning)));
  rowsOr("pods", pods, 4, ui.model.queue.length > 0 ? "No pod matches the filter." : "No pod waits for a GPU.",
    (pod) => `${pod.namespace}/${pod.pod}`, (pod) => {
      const waits = el("td", { class: "number" }, age(pod.created));
      if (pod.created !== undefined) waits.dataset.created = pod.created;
      const nodes = Object.entries(pod.nodes ?? {}).sort((a, b) => b[1] - a[1]);
      const total = nodes.reduce((sum, [, count]) => sum + count, 0);
      return el("tr", {},
        el("th", { scope: "row" }, swatch(pod.namespace), el("span", { class: "namespace" }, `${pod.namespace}/`), pod.pod,
          pod.gang ? el("span", { class: "chip" }, `gang ${pod.gang}`) : null),
        waits,
        el("td", {}, pod.requests.map((request) => el("div", {}, request))),
        el("td", { class: "why" },
          pod.state ? el("span", { class: `chip ${pod.state.toLowerCase()}` }, pod.reason ?? QUEUE_STATES[pod.state] ?? pod.state) : null,
          el("span", {}, pod.summary ?? "not explained; use kubectl drava explain pod"),
          nodes.length > 1 ? el("span", { class: "split", role: "img", "aria-label": nodes.map(([code, count]) => `${count} nodes ${code}`).join(", ") },
            nodes.map(([code, count], index) => el("span", {
              title: `${plural(count, "node")}: ${code}`, style: { width: `${percent(count, total)}%`, background: `var(--series-${index % 6})` },
            }))) : null));
    });
}

const QUOTA_NAMES = { memory: "Memory", cores: "GPU time", devices: "Devices" };

function drawQuotas(main) {
  const words = filterWords();
  const quotas = ui.model.quotas.filter((quota) => words.every((word) => [quota.quota, ...quota.namespaces].join(" ").toLowerCase().includes(word)));
  frame(main, "quotas", () => [el("div", { class: "quotas", id: "quota-list" })]);
  if (quotas.length === 0) {
    sync(byId("quota-list"), ["none"], String, () => el("p", { class: "empty" }, ui.model.quotas.length > 0
      ? "No quota matches the filter." : "No GpuQuota exists: namespaces use GPUs without limits."));
    return;
  }
  sync(byId("quota-list"), quotas, (quota) => quota.quota, (quota) => el("section", { class: "quota", "aria-label": `Quota ${quota.quota}` },
    el("h2", {}, quota.quota),
    el("p", { class: "namespaces" }, quota.namespaces.length ? quota.namespaces.map((name) => el("span", {}, swatch(name), name)) : "no namespaces"),
    quota.resources.filter((resource) => resource.limit !== undefined || resource.guarantee !== undefined).map(quotaResource)));
}

function quotaResource(resource) {
  const amount = { memory: bytes, cores: gpuTime, devices: (count) => String(count) }[resource.resource];
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
      resource.guarantee === undefined ? null : el("i", { title: `guarantee ${amount(resource.guarantee)}`, style: { left: `${percent(resource.guarantee, top)}%` } })),
    el("small", {}, texts.join(" · ")));
}
