// Elements, texts and colors that all views use. Data reaches the page as text only: names are chosen by tenants.
"use strict";

const byId = (id) => document.getElementById(id);
const VIEWS = ["gpus", "tenants", "queue", "quotas"];
const STATES = {
  whole: "Whole", shared: "Shared", partitioned: "Partitioned", free: "Free", reserved: "Reserved", excluded: "Excluded", unhealthy: "Unhealthy",
};
// From this number of nodes on, the map is shown first.
const MAP_FROM = 17;
// Number of nodes in the list, of tiles in the map, and of rows in a table that are drawn at a time.
const CHUNK = { list: 40, map: 240, rows: 200 };
const ui = { model: null, view: "gpus", filter: "", layout: null, color: "use", state: null, code: null, stale: false, drawn: {} };

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
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
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
        const open = element.querySelector("details")?.open;
        if (element === next) next = fresh;
        element.replaceWith(fresh);
        if (focused) (fresh.matches("button,a") ? fresh : fresh.querySelector("button,a,summary"))?.focus();
        if (open) fresh.querySelector("details")?.setAttribute("open", "");
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

// The first items of a list; its others are drawn when its end comes into view.
const limitOf = (list) => ui.drawn[list] ?? CHUNK[list] ?? CHUNK.rows;
const drawn = (items, list) => items.slice(0, limitOf(list));

// Fills the element at the end of a list: a button if not all of it is drawn.
function drawMore(parent, list, count, noun) {
  const shown = limitOf(list);
  sync(parent, count > shown ? [[shown, count]] : [], String, () => {
    const more = () => {
      ui.drawn[list] = shown + (CHUNK[list] ?? CHUNK.rows);
      draw();
    };
    const button = el("button", { type: "button", class: "more", onclick: more },
      `${shown.toLocaleString("en")} of ${plural(count, noun)} are shown: show more`);
    new IntersectionObserver((entries, observer) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      if (button.isConnected) more();
    }, { rootMargin: "800px" }).observe(button);
    return button;
  });
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

// A sum of GPU time as a number of GPUs: 250 cores are the time of 2.5 GPUs.
function gpuTime(cores) {
  const text = (cores / 100).toLocaleString("en", { maximumFractionDigits: 1 });
  return `${text} ${text === "1" ? "GPU" : "GPUs"}`;
}

function age(created) {
  if (created === undefined) return "–";
  const seconds = Math.max(0, Math.floor(Date.now() / 1000 - created));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

// Whether the user may not list a kind of objects, of which the page must not say that there are none.
const isHidden = (plural) => ui.model.limits.hidden.includes(plural);

// Removes what all names begin with and end with, up to a separator: tiles are narrow, and names of nodes are long.
function shortNames(names) {
  const short = new Map(names.map((name) => [name, name]));
  if (names.length < 2 || names.every((name) => name.length <= 11)) return short;
  const common = (texts) => {
    const [first, ...others] = texts;
    let length = 0;
    while (length < first.length && others.every((other) => other[length] === first[length])) length += 1;
    return first.slice(0, length).match(/^.*[-._]/)?.[0].length ?? 0;
  };
  const reverse = (text) => [...text].reverse().join("");
  const [start, end] = [common(names), common(names.map(reverse))];
  for (const name of names) if (name.length > start + end) short.set(name, name.slice(start, name.length - end));
  return short;
}

const COLORS = 12;
let tenantColors = new Map();

// Gives the namespaces with most memory a color each, the one of its name or the next free one; the others share gray.
// A namespace keeps its color while it is among them.
function assignColors(tenants, before) {
  const largest = [...tenants].sort((a, b) => b.memory - a.memory || (a.namespace < b.namespace ? -1 : 1)).slice(0, COLORS);
  const names = largest.map((tenant) => tenant.namespace).sort();
  const colors = new Map(names.filter((name) => before.has(name)).map((name) => [name, before.get(name)]));
  const taken = new Set(colors.values());
  for (const namespace of names.filter((name) => !colors.has(name))) {
    let hash = 2166136261;
    for (const letter of namespace) hash = Math.imul(hash ^ letter.codePointAt(0), 16777619) >>> 0;
    let color = hash % COLORS;
    while (taken.has(color)) color = (color + 1) % COLORS;
    taken.add(color);
    colors.set(namespace, color);
  }
  return colors;
}

const hue = (namespace) => `var(--tenant-${tenantColors.get(namespace) ?? "others"})`;

const swatch = (namespace) => el("i", { class: "swatch", style: { background: hue(namespace) } });
const podName = (claim) => claim.pods[0] ?? claim.name.split("/")[1];
const isUnhealthy = (gpu) => gpu.state === "unhealthy";
