// Elements, texts and colors that all views use. Data reaches the page as text only: names are chosen by tenants.
"use strict";

const byId = (id) => document.getElementById(id);
const VIEWS = ["gpus", "tenants", "queue", "quotas"];
const STATES = {
  whole: "Whole", shared: "Shared", partitioned: "Partitioned", free: "Free", excluded: "Excluded", unhealthy: "Unhealthy",
};
// From this number of nodes on, the map is shown first.
const MAP_FROM = 17;
const ui = { model: null, view: "gpus", filter: "", layout: null, color: "use", state: null, reason: null, stale: false };

// Creates an element. Properties with a dash and `role` are attributes; others are set on the object.
function el(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined) continue;
    if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Makes the children of `parent` those of `items`, and renders only items that have changed: focus and scroll survive.
function sync(parent, items, key, render) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  const context = ui.color + ui.layout;
  for (const item of items) {
    const id = key(item);
    const text = context + JSON.stringify(item);
    let element = known.get(id);
    known.delete(id);
    if (!element || element.model !== text) {
      const fresh = render(item);
      fresh.dataset.key = id;
      fresh.model = text;
      if (element) {
        const focused = element.contains(document.activeElement);
        if (element === next) next = fresh;
        element.replaceWith(fresh);
        if (focused) (fresh.matches("button,a") ? fresh : fresh.querySelector("button,a"))?.focus();
      }
      element = fresh;
    }
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  for (const gone of known.values()) gone.remove();
  // Children of another view have no key.
  for (const child of [...parent.children]) if (child.dataset.key === undefined) child.remove();
}

function bytes(amount) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (amount >= 1024 && unit < units.length - 1) [amount, unit] = [amount / 1024, unit + 1];
  const digits = amount >= 100 || Number.isInteger(amount) ? 0 : 1;
  return `${amount.toFixed(digits).replace(/\.0$/, "")} ${units[unit]}`;
}

const percent = (part, total) => (total > 0 ? (100 * part) / total : 0);
const rounded = (value) => (value > 0 && value < 1 ? "<1" : String(Math.round(value)));
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const gpuTime = (cores) => `${(cores / 100).toLocaleString("en", { maximumFractionDigits: 1 })} GPUs`;

function age(created) {
  if (created === undefined) return "–";
  const seconds = Math.max(0, Math.floor(Date.now() / 1000 - created));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

const COLORS = 12;
let tenantColors = new Map();

// Gives each namespace a color: the one of its name, or the next that no other namespace of the cluster has.
function assignColors(namespaces) {
  tenantColors = new Map();
  const taken = new Set();
  for (const namespace of [...namespaces].sort()) {
    let hash = 2166136261;
    for (const letter of namespace) hash = Math.imul(hash ^ letter.codePointAt(0), 16777619) >>> 0;
    let color = hash % COLORS;
    for (let tries = 0; taken.has(color) && tries < COLORS; tries += 1) color = (color + 1) % COLORS;
    if (taken.add(color).size === COLORS) taken.clear();
    tenantColors.set(namespace, color);
  }
}

const hue = (namespace) => `var(--tenant-${tenantColors.get(namespace) ?? 10})`;

const podName = (claim) => claim.pods[0] ?? claim.name.split("/")[1];
const isUnhealthy = (gpu) => gpu.state === "unhealthy";
