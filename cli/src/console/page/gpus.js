// View of nodes with their GPUs, as a list and as a map; details of a node; claims of a tenant who may not see GPUs.
"use strict";

function matchesGpu(node, gpu, words) {
  if (ui.state && gpu.state !== ui.state) return false;
  if (words.length === 0) return true;
  const claims = gpu.claims.flatMap((claim) => [claim.name, ...claim.pods]);
  const taints = gpu.taints.map((taint) => taint.taint);
  const text = [node.name, gpu.gpu, gpu.uuid, gpu.productName, gpu.state, ...claims, ...taints, ...(gpu.reserved ?? [])].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function selectedNodes() {
  const words = filterWords();
  if (words.length === 0 && !ui.state) return ui.model.nodes;
  return ui.model.nodes
    .map((node) => ({ ...node, all: node.gpus, gpus: node.gpus.filter((gpu) => matchesGpu(node, gpu, words)) }))
    .filter((node) => node.gpus.length > 0 || (!ui.state && words.every((word) => node.name.toLowerCase().includes(word))));
}

// Claims of other namespaces may have a GPU that seems free to a user who reads one namespace.
const stateName = (state) => (state === "free" && ui.model.limits.namespace !== undefined ? "Not used by you" : STATES[state]);

function describeGpu(gpu) {
  const claims = gpu.claims.map((claim) => `${claim.name} ${bytes(claim.memory)}${usedText(claim)}`).join(", ");
  const reserved = gpu.reserved ? `, reserved for ${gpu.reserved.join(", ")}` : "";
  return `${gpu.gpu}, ${gpu.productName}, ${stateName(gpu.state).toLowerCase()}${reserved}, ${bytes(gpu.memory.allocated)} of ` +
    `${bytes(gpu.memory.total)} allocated${claims ? `: ${claims}` : ""}`;
}

const segmentColor = (claim) => (ui.color === "tenant" ? { "--segment": hue(claim.namespace) } : {});

// Guaranteed GPU time of a claim; a partition has its own compute units.
const timeOf = (claim) => (claim.access === "partition" ? "–" : claim.cores > 0 ? `${claim.cores}%` : "best effort");

// What a claim uses at the moment, as far as it was measured.
const usedMemory = (claim) => (claim.measured ? bytes(claim.measured.memory) : "–");
const usedTime = (claim) => (claim.measured?.cores === undefined ? "–" : `${claim.measured.cores}%`);
// Since when a share is idle.
const idleText = ({ idleSince }) => (idleSince === undefined ? "" : `, idle since ${new Date(idleSince).toLocaleString()}`);
// The share of which a claim is a part.
const addsText = ({ addsTo }) => (addsTo === undefined ? "" : `, adds to ${addsTo}`);
// The most that a share with memory.limit may use at the moment, and what of it is lent.
const lentText = ({ measured }) => (measured?.lentMemory === undefined ? "" :
  `limit ${bytes(measured.memoryLimit)}, ${bytes(measured.lentMemory)} lent`);
const usedText = (claim) => (claim.measured ?
  `; uses ${usedMemory(claim)}, ${usedTime(claim)} of GPU time${lentText(claim) && `; ${lentText(claim)}`}` : "");

// A claim as a part of its GPU: `axis` is the direction along which memory is drawn. The style sheet shows a label only where
// it fits. The line along its edge is the memory in use.
function segment(gpu, claim, axis) {
  const pods = claim.pods.length > 0 ? `pod ${claim.pods.join(", ")}` : "no pod";
  const time = claim.access === "share" ? `, GPU time ${timeOf(claim)}` : "";
  const used = claim.measured && axis === "width" ? `${Math.min(100, percent(claim.measured.memory, claim.memory))}%` : null;
  return el("span", {
    class: `segment ${claim.access}`, title: `${claim.name} (${pods}${addsText(claim)}): ${claim.access}, ${bytes(claim.memory)}${time}${usedText(claim)}${idleText(claim)}`,
    style: { [axis]: `${Math.min(100, percent(claim.memory, gpu.memory.total))}%`, ...segmentColor(claim) },
  }, used && el("i", { class: "used", style: { width: used } }), axis === "width" ? [el("span", { class: "label" }, podName(claim)), el("small", {}, bytes(claim.memory))] : []);
}

function bar(gpu, largest) {
  const time = gpu.claims.filter((claim) => claim.cores > 0).map((claim) => el("span", {
    class: `segment ${claim.access}`, style: { width: `${Math.min(100, percent(claim.cores, gpu.cores.total))}%`, ...segmentColor(claim) },
  }));
  return el("div", { class: "scale" }, el("div", {
    class: `bar ${gpu.state}`, role: "img", "aria-label": describeGpu(gpu),
    style: { width: `${percent(gpu.memory.total, largest)}%` },
  }, el("div", { class: "memory" }, gpu.claims.map((claim) => segment(gpu, claim, "width"))), el("div", { class: "time" }, time)));
}

function gpuRow(gpu, largest) {
  const taints = gpu.taints.map((taint) => el("span", {
    class: `chip ${taint.kind}`, title: taint.isWholeGpu ? taint.taint : `${taint.taint} (some partitions)`,
  }, taint.kind === "other" ? taint.taint : taintText(taint)));
  const reserved = (gpu.reserved ?? []).map((pod) => el("span", {
    class: "chip reserved", title: "Not allocated, and not free for other pods",
  }, gpu.state === "reserved" ? `for ${pod}` : `reserved for ${pod}`));
  const state = el("span", { class: `state ${gpu.state}` }, stateName(gpu.state));
  return el("div", { class: "gpu" },
    el("div", { class: "name" }, gpu.gpu, el("small", { title: gpu.uuid }, gpu.uuid.slice(0, 12))),
    bar(gpu, largest),
    el("div", { class: "amount" }, bytes(gpu.memory.allocated), el("small", {}, ` / ${bytes(gpu.memory.total)}`)),
    // Partitions have their own compute units, so GPU time is not shared.
    el("div", { class: "amount time-amount" }, gpu.state === "partitioned" ? "–" : `${gpu.cores.allocated}%`, el("small", {}, " GPU time")),
    el("div", { class: "states" }, state, taints, reserved));
}

// `gpu.drava.dev/unhealthy=xid-79:NoExecute` as `xid-79`.
function taintText(taint) {
  const [, value] = taint.taint.replace(/:[A-Za-z]+$/, "").split("=");
  return value ?? taint.kind;
}

function nodeHead(node) {
  // A filter hides GPUs, and changes no sum.
  const all = node.all ?? node.gpus;
  const models = [...new Set(all.map((gpu) => gpu.productName))].join(", ");
  const shown = node.gpus.length < all.length ? `${node.gpus.length} of ` : "";
  const sum = (amount) => all.reduce((total, gpu) => total + gpu.memory[amount], 0);
  const condition = { ready: "ready", notReady: "not ready", cordoned: "cordoned", unknown: "condition unknown" }[node.condition];
  return [
    el("span", { class: `dot ${node.condition}`, title: condition }),
    el("span", { class: "title" }, node.name),
    node.condition === "ready" ? null : el("span", { class: `chip ${node.condition}` }, condition),
    el("span", { class: "models" }, all.length ? `${shown}${all.length} × ${models}` : "no GPUs"),
    el("span", { class: "sum" }, `${bytes(sum("allocated"))} of ${bytes(sum("total"))}`),
  ];
}

function nodeCard(node, largest) {
  return el("section", { class: "node", "aria-label": `Node ${node.name}` },
    el("h2", {}, el("button", { class: "head", type: "button", onclick: () => openNode(node.name) }, nodeHead(node))),
    node.problem ? el("p", { class: "problem" }, node.problem) : null,
    node.gpus.map((gpu) => gpuRow(gpu, largest)));
}

function tile(node, largest, name) {
  const states = node.gpus.map((gpu) => `${gpu.gpu} ${stateName(gpu.state).toLowerCase()}`).join(", ");
  const bars = node.gpus.map((gpu) => el("span", {
    class: `column ${gpu.state}${gpu.reserved ? " held" : ""}`, title: describeGpu(gpu), style: { height: `${percent(gpu.memory.total, largest)}%` },
  }, gpu.claims.map((claim) => segment(gpu, claim, "height"))));
  const faults = node.gpus.filter(isUnhealthy).length;
  const isBad = faults > 0 || node.problem || node.condition === "notReady";
  return el("button", {
    class: `tile ${node.condition}${isBad ? " bad" : ""}`, type: "button", onclick: () => openNode(node.name),
    "aria-label": `Node ${node.name}, ${node.condition}: ${states}`,
  }, el("span", { class: "columns" }, bars),
  el("span", { class: "tile-name", title: node.name }, el("span", { class: `dot ${node.condition}` }), el("bdi", {}, name)));
}

// Keys of the colors: states, which filter; by tenant, the namespaces with a color of their own, and the states that are no use.
function drawLegend() {
  const isByTenant = ui.color === "tenant";
  const count = (state) => ui.model.totals.gpus[state] ?? 0;
  const states = Object.keys(STATES).filter((state) => (count(state) > 0 || ui.state === state) &&
    !(isByTenant && ["whole", "shared", "partitioned"].includes(state)));
  const withGpus = ui.model.tenants.filter((tenant) => tenant.memory > 0).map((tenant) => tenant.namespace);
  const colored = withGpus.filter((namespace) => tenantColors.has(namespace));
  const keys = [
    ...(isByTenant ? colored.map((namespace) => ({ namespace, isPressed: ui.filter === namespace })) : []),
    ...(isByTenant && withGpus.length > colored.length ? [{ others: withGpus.length - colored.length }] : []),
    ...states.map((state) => ({ state, count: count(state), isPressed: ui.state === state })),
  ];
  sync(byId("legend"), keys, (key) => key.state ?? `tenant ${key.namespace}`, (key) => {
    if (key.others) return el("span", { class: "key", title: "The namespaces with least memory share a color" }, el("i", { style: { background: "var(--tenant-others)" } }), plural(key.others, "other"));
    if (key.namespace) {
      return el("button", {
        type: "button", class: "key", "aria-pressed": String(key.isPressed), title: `Filter by ${key.namespace}`,
        onclick: () => setFilter(key.isPressed ? "" : key.namespace),
      }, el("i", { style: { background: hue(key.namespace) } }), key.namespace);
    }
    return el("button", {
      type: "button", class: `key ${key.state}`, "aria-pressed": String(key.isPressed), title: `Show only GPUs that are ${stateName(key.state).toLowerCase()}`,
      onclick: () => { ui.state = key.isPressed ? null : key.state; draw(); },
    }, el("i", {}), stateName(key.state), el("b", {}, key.count.toLocaleString("en")));
  });
}

function drawGpus(main) {
  if (isHidden("resourceslices")) return drawOwn(main);
  const nodes = selectedNodes();
  const largest = Math.max(1, ...ui.model.nodes.flatMap((node) => node.gpus.map((gpu) => gpu.memory.total)));
  const layout = ui.layout ?? (ui.model.nodes.length >= MAP_FROM ? "map" : "list");
  const section = frame(main, "gpus", () => [
    el("div", { class: "bar-tools" },
      el("div", { class: "legend", id: "legend" }),
      choice("Color by", "color", [["use", "Use"], ["tenant", "Tenant"]]),
      choice("Layout", "layout", [["list", "List"], ["map", "Map"]])),
    el("div", { id: "nodes" }), el("div", { id: "more-nodes" }),
  ]);
  drawLegend();
  for (const button of section.querySelectorAll("[data-choice=layout] button")) {
    button.setAttribute("aria-pressed", String(button.dataset.value === layout));
  }
  const gpus = (all) => all.reduce((sum, node) => sum + node.gpus.length, 0);
  drawResult(Boolean(ui.filter.trim() || ui.state), `${gpus(nodes).toLocaleString("en")} of ${plural(gpus(ui.model.nodes), "GPU")} on ${plural(nodes.length, "node")}`);
  const container = byId("nodes");
  container.className = layout;
  drawMore(byId("more-nodes"), layout, nodes.length, "node");
  if (nodes.length === 0) {
    sync(container, ["none"], String, () => el("p", { class: "empty" }, ui.model.nodes.length === 0
      ? "No node publishes GPUs of drava. Check that the node driver runs: kubectl drava doctor"
      : "No GPU matches the filter."));
    return;
  }
  if (layout === "list") {
    sync(container, drawn(nodes, "list"), (node) => `list ${node.name}`, (node) => nodeCard(node, largest));
    return;
  }
  const groups = new Map();
  for (const node of nodes) {
    const model = [...new Set(node.gpus.map((gpu) => gpu.productName))].join(" + ") || "Nodes without usable GPUs";
    if (!groups.has(model)) groups.set(model, []);
    groups.get(model).push(node);
  }
  let left = limitOf("map");
  const named = [...groups].sort(([, a], [, b]) => b.length - a.length).map(([model, members]) => {
    const shown = members.slice(0, left);
    left -= shown.length;
    return { model, members, shown };
  }).filter(({ shown }) => shown.length > 0);
  const short = shortNames(ui.model.nodes.map((node) => node.name));
  // The group is reused; its tiles are synchronized one by one.
  sync(container, named.map(({ model }) => model), (model) => `map ${model}`, (model) => el("section", { class: "group", "aria-label": model },
    el("h2", {}, el("span", { class: "title" }, model), el("span", { class: "models" })), el("div", { class: "tiles" })));
  named.forEach(({ members, shown }, index) => {
    const group = container.children[index];
    const sum = (amount) => members.reduce((total, node) => total + node.gpus.reduce((of, gpu) => of + gpu.memory[amount], 0), 0);
    group.querySelector(".models").textContent = `${plural(members.length, "node")}, ${plural(gpus(members), "GPU")}, ` +
      `${rounded(percent(sum("allocated"), sum("total")))}% of ${bytes(sum("total"))} allocated`;
    sync(group.querySelector(".tiles"), shown, (node) => node.name, (node) => tile(node, largest, short.get(node.name)));
  });
}

// What a user without permission to list ResourceSlices has: the claims show it.
function drawOwn(main) {
  const words = filterWords();
  const claims = ui.model.own.flatMap((gpu) => gpu.claims.map((claim) => ({ node: gpu.node, gpu: gpu.gpu, ...claim })));
  const shown = claims.filter((claim) => words.every((word) =>
    [claim.node, claim.gpu, claim.name, claim.device, ...claim.pods].join(" ").toLowerCase().includes(word)));
  frame(main, "gpus", () => [table(["Claim", "Pods", "Node", "GPU", "Use", "Memory", "GPU time"], "own", "wide")]);
  drawResult(words.length > 0, `${shown.length.toLocaleString("en")} of ${plural(claims.length, "claim")}`);
  const whole = (value, text) => (value === undefined ? "all" : text);
  rowsOr("own", shown, 7, claims.length > 0 ? "No claim matches the filter." : "No claim of the namespace has a GPU. GPUs themselves are not visible to you.",
    (claim) => `${claim.name} ${claim.device}`, (claim) => row(
      head(claim.name.split("/")[1]),
      cell("Pods", claim.pods.join(", ")), cell("Node", claim.node), cell("GPU", claim.gpu), cell("Use", claim.access + idleText(claim)),
      number("Memory", whole(claim.memory, claim.memory && bytes(claim.memory))),
      number("GPU time", whole(claim.cores, timeOf(claim)))));
}

// Returns the section of a view, which is created when the view is opened.
function frame(main, name, children) {
  let section = main.querySelector(`:scope > [data-view=${name}]`);
  if (!section) {
    section = el("div", {}, children());
    section.dataset.view = name;
    main.replaceChildren(section);
  }
  return section;
}

function choice(label, name, values) {
  const group = el("div", { class: "choice", role: "group", "aria-label": label }, el("span", { "aria-hidden": "true" }, label),
    values.map(([value, text]) => {
      const button = el("button", {
        type: "button", "aria-pressed": String(ui[name] === value),
        onclick: () => {
          ui[name] = value;
          for (const other of group.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
          draw();
        },
      }, text);
      button.dataset.value = value;
      return button;
    }));
  group.dataset.choice = name;
  return group;
}

function openNode(name) {
  const dialog = byId("detail");
  dialog.dataset.node = name;
  drawDetail();
  if (!dialog.open) dialog.showModal();
}

function drawDetail() {
  const dialog = byId("detail");
  const node = ui.model.nodes.find((candidate) => candidate.name === dialog.dataset.node);
  if (!node) return dialog.close();
  const text = JSON.stringify(node) + ui.color;
  if (dialog.model === text) return;
  dialog.model = text;
  const largest = Math.max(1, ...node.gpus.map((gpu) => gpu.memory.total));
  const claims = node.gpus.flatMap((gpu) => gpu.claims.map((claim) => ({ gpu, claim })));
  const rows = claims.map(({ gpu, claim }) => row(
    head(swatch(claim.namespace), claim.name), cell("GPU", gpu.gpu), cell("Pods", claim.pods.join(", ")), cell("Use", claim.access + idleText(claim)),
    number("Memory", bytes(claim.memory)), number("Memory in use", usedMemory(claim), lentText(claim) && ` (${lentText(claim)})`),
    number("GPU time", timeOf(claim)), number("GPU time in use", usedTime(claim))));
  const list = table(["Claim", "GPU", "Pods", "Use", "Memory", "in use", "GPU time", "in use"], "detail-claims", "wide");
  list.querySelector("tbody").append(...rows);
  dialog.replaceChildren(
    el("div", { class: "dialog-head" }, el("h2", { id: "detail-title" }, nodeHead(node)),
      el("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => dialog.close() }, "✕")),
    el("div", { class: "dialog-body" }, node.problem ? el("p", { class: "problem" }, node.problem) : null,
      node.gpus.map((gpu) => gpuRow(gpu, largest)),
      claims.length > 0 ? list : el("p", { class: "empty" }, "No claim has a GPU of this node.")));
}
