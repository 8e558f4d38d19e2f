// View of nodes with their GPUs, as a list and as a map; details of a node.
"use strict";

function matchesGpu(node, gpu, words) {
  if (ui.state && gpu.state !== ui.state) return false;
  if (words.length === 0) return true;
  const claims = gpu.claims.flatMap((claim) => [claim.name, ...claim.pods]);
  const taints = gpu.taints.map((taint) => taint.taint);
  const text = [node.name, gpu.gpu, gpu.uuid, gpu.productName, gpu.state, ...claims, ...taints].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function selectedNodes() {
  const words = filterWords();
  if (words.length === 0 && !ui.state) return ui.model.nodes;
  return ui.model.nodes
    .map((node) => ({ ...node, gpus: node.gpus.filter((gpu) => matchesGpu(node, gpu, words)) }))
    .filter((node) => node.gpus.length > 0 || (!ui.state && words.every((word) => node.name.toLowerCase().includes(word))));
}

function describeGpu(gpu) {
  const claims = gpu.claims.map((claim) => `${claim.name} ${bytes(claim.memory)}`).join(", ");
  return `${gpu.gpu}, ${gpu.productName}, ${STATES[gpu.state].toLowerCase()}, ${bytes(gpu.memory.allocated)} of ` +
    `${bytes(gpu.memory.total)} allocated${claims ? `: ${claims}` : ""}`;
}

// A claim as a part of its GPU: `axis` is the direction along which memory is drawn.
function segment(gpu, claim, axis) {
  const kind = claim.access;
  const size = `${Math.min(100, percent(claim.memory, gpu.memory.total))}%`;
  const color = ui.color === "tenant" ? { "--segment": hue(claim.namespace) } : {};
  const pods = claim.pods.length > 0 ? `pod ${claim.pods.join(", ")}` : "no pod";
  const time = kind === "share" ? `, ${claim.cores > 0 ? `${claim.cores}% of GPU time` : "best-effort GPU time"}` : "";
  return el("span", {
    class: `segment ${kind}`, title: `${claim.name} (${pods}): ${kind}, ${bytes(claim.memory)}${time}`,
    style: { [axis]: size, ...color },
  }, axis === "width" ? el("span", { class: "label" }, podName(claim), el("small", {}, ` ${bytes(claim.memory)}`)) : null);
}

function bar(gpu, largest) {
  const time = gpu.claims.filter((claim) => claim.cores > 0).map((claim) => el("span", {
    class: `segment ${claim.access}`,
    style: {
      width: `${Math.min(100, percent(claim.cores, gpu.cores.total))}%`,
      ...(ui.color === "tenant" ? { "--segment": hue(claim.namespace) } : {}),
    },
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
  const state = el("span", { class: `state ${gpu.state}` }, STATES[gpu.state]);
  return el("div", { class: "gpu" },
    el("div", { class: "name" }, gpu.gpu, el("small", { title: gpu.uuid }, gpu.uuid.slice(0, 12))),
    bar(gpu, largest),
    el("div", { class: "amount" }, bytes(gpu.memory.allocated), el("small", {}, ` / ${bytes(gpu.memory.total)}`)),
    el("div", { class: "amount time-amount" }, ...gpuTimeText(gpu)),
    el("div", { class: "states" }, state, taints));
}

// A partition has its own compute units, so GPU time is not shared.
function gpuTimeText(gpu) {
  return gpu.state === "partitioned" ? ["–"] : [`${gpu.cores.allocated}%`, el("small", {}, " time")];
}

// `gpu.drava.dev/unhealthy=xid-79:NoExecute` as `xid-79`.
function taintText(taint) {
  const [, value] = taint.taint.replace(/:[A-Za-z]+$/, "").split("=");
  return value ?? taint.kind;
}

function nodeHead(node) {
  const models = [...new Set(node.gpus.map((gpu) => gpu.productName))].join(", ");
  const sum = (amount) => node.gpus.reduce((total, gpu) => total + gpu.memory[amount], 0);
  const condition = { ready: "ready", notReady: "not ready", cordoned: "cordoned", unknown: "unknown" }[node.condition];
  return [
    el("span", { class: `dot ${node.condition}`, title: condition }),
    el("span", { class: "title" }, node.name),
    node.condition === "ready" ? null : el("span", { class: `chip ${node.condition}` }, condition),
    el("span", { class: "models" }, node.gpus.length ? `${node.gpus.length} × ${models}` : "no GPUs"),
    el("span", { class: "sum" }, `${bytes(sum("allocated"))} of ${bytes(sum("total"))}`),
  ];
}

function nodeCard(node, largest) {
  return el("section", { class: "node", "aria-label": `Node ${node.name}` },
    el("h2", {}, el("button", { class: "head", type: "button", onclick: () => openNode(node.name) }, nodeHead(node))),
    node.problem ? el("p", { class: "problem" }, node.problem) : null,
    node.gpus.map((gpu) => gpuRow(gpu, largest)));
}

function tile(node, largest) {
  const states = node.gpus.map((gpu) => `${gpu.gpu} ${STATES[gpu.state].toLowerCase()}`).join(", ");
  const bars = node.gpus.map((gpu) => el("span", {
    class: `column ${gpu.state}`, title: describeGpu(gpu), style: { height: `${percent(gpu.memory.total, largest)}%` },
  }, gpu.claims.map((claim) => segment(gpu, claim, "height"))));
  const faults = node.gpus.filter(isUnhealthy).length;
  const isBad = faults > 0 || node.problem || node.condition === "notReady";
  return el("button", {
    class: `tile ${node.condition}${isBad ? " bad" : ""}`, type: "button", onclick: () => openNode(node.name),
    "aria-label": `Node ${node.name}, ${node.condition}: ${states}`,
  }, el("span", { class: "columns" }, bars), el("span", { class: "tile-name" }, el("span", { class: `dot ${node.condition}` }), el("bdi", {}, node.name)));
}

function drawGpus(main) {
  const nodes = selectedNodes();
  const largest = Math.max(1, ...ui.model.nodes.flatMap((node) => node.gpus.map((gpu) => gpu.memory.total)));
  const layout = ui.layout ?? (ui.model.nodes.length >= MAP_FROM ? "map" : "list");
  const section = frame(main, "gpus", () => [
    el("div", { class: "bar-tools" },
      el("div", { class: "legend", id: "legend" }),
      choice("Color by", "color", [["use", "Use"], ["tenant", "Tenant"]]),
      choice("Layout", "layout", [["list", "List"], ["map", "Map"]])),
    el("div", { id: "nodes" }),
  ]);
  sync(byId("legend"), Object.entries(STATES), ([state]) => state + ui.state + (ui.model.totals.gpus[state] ?? 0), ([state, name]) => el("button", {
    type: "button", class: `key ${state}`, "aria-pressed": String(ui.state === state),
    title: `Show only GPUs that are ${name.toLowerCase()}`,
    onclick: () => { ui.state = ui.state === state ? null : state; draw(); },
  }, el("i", {}), name, el("b", {}, String(ui.model.totals.gpus[state] ?? 0))));
  for (const button of section.querySelectorAll("[data-choice=layout] button")) {
    button.setAttribute("aria-pressed", String(button.dataset.value === layout));
  }
  const container = byId("nodes");
  container.className = layout;
  if (nodes.length === 0) {
    sync(container, ["none"], String, () => el("p", { class: "empty" }, ui.model.nodes.length === 0
      ? "No node publishes GPUs of drava. Check that the node driver runs: kubectl drava doctor"
      : "No GPU matches the filter."));
    return;
  }
  if (layout === "list") {
    sync(container, nodes, (node) => `list ${node.name}`, (node) => nodeCard(node, largest));
    return;
  }
  const groups = new Map();
  for (const node of nodes) {
    const model = [...new Set(node.gpus.map((gpu) => gpu.productName))].join(" + ") || "Nodes without usable GPUs";
    groups.set(model, [...(groups.get(model) ?? []), node]);
  }
  const named = [...groups].map(([model, members]) => ({ model, members })).sort((a, b) => b.members.length - a.members.length);
  // The group is reused; its tiles are synchronized one by one.
  sync(container, named.map(({ model }) => model), (model) => `map ${model}`, (model) => el("section", { class: "group", "aria-label": model },
    el("h2", {}, el("span", { class: "title" }, model), el("span", { class: "models" })), el("div", { class: "tiles" })));
  named.forEach(({ members }, index) => {
    const group = container.children[index];
    const gpus = members.flatMap((node) => node.gpus);
    const sum = (amount) => gpus.reduce((total, gpu) => total + gpu.memory[amount], 0);
    group.querySelector(".models").textContent = `${plural(members.length, "node")}, ${plural(gpus.length, "GPU")}, ` +
      `${rounded(percent(sum("allocated"), sum("total")))}% of ${bytes(sum("total"))} allocated`;
    sync(group.querySelector(".tiles"), members, (node) => node.name, (node) => tile(node, largest));
  });
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
  const rows = claims.map(({ gpu, claim }) => el("tr", {},
    el("td", {}, gpu.gpu), el("td", {}, swatch(claim.namespace), claim.name), el("td", {}, claim.pods.join(", ") || "–"),
    el("td", {}, claim.access), el("td", { class: "number" }, bytes(claim.memory)),
    el("td", { class: "number" }, claim.access === "partition" ? "–" : claim.cores > 0 ? `${claim.cores}%` : "best effort")));
  const head = ["GPU", "Claim", "Pods", "Use", "Memory", "GPU time"].map((title) => el("th", { scope: "col" }, title));
  dialog.replaceChildren(
    el("div", { class: "dialog-head" }, el("h2", { id: "detail-title" }, nodeHead(node)),
      el("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => dialog.close() }, "✕")),
    el("div", { class: "dialog-body" }, node.problem ? el("p", { class: "problem" }, node.problem) : null,
      node.gpus.map((gpu) => gpuRow(gpu, largest)),
      claims.length > 0
        ? el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))
        : el("p", { class: "empty" }, "No claim has a GPU of this node.")));
}

const swatch = (namespace) => el("i", { class: "swatch", style: { background: hue(namespace) } });
