// The page: an image in, its nearest images out, by the frozen backbone and by a mask; a map of the collection.

const $ = (id) => document.getElementById(id);
const SENT_AS_IS = 8e6; // bytes; what is larger, or in a format that the server does not read, is redrawn here
const FORMATS = ["image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", "image/tiff", "image/avif"];
const LONGEST = 2048; // pixels of what is redrawn
const HUES = 12;
const SVG = "http://www.w3.org/2000/svg";

let collection = null;
let models = [];
let query = null; // {input: data URI} or {item: number}
let running = null;
let points = [];
let circles = []; // one for each point
let at = -1;

async function get(path, options = {}) {
  const answer = await fetch(path, options);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error?.message ?? `the server answered ${answer.status}`);
  return content;
}

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

function made(tag, fields = {}, ...children) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children);
  return element;
}

const thumbnail = (number) => `v1/collection/thumbnails/${number}`;
const named = (item) => (item.label === null ? item.name : `${item.label}: ${item.name}`);

// ---- the image to search for ---------------------------------------------------------------------------------------

function dataUri(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the file cannot be read"));
    reader.readAsDataURL(blob);
  });
}

async function redrawn(file) {
  const picture = made("img", { src: URL.createObjectURL(file) });
  await picture.decode().catch(() => {
    throw new Error(`${file.name || "this"} is not an image that this browser can read`);
  });
  const [width, height] = [picture.naturalWidth, picture.naturalHeight];
  const scale = Math.min(1, LONGEST / Math.max(width, height));
  const canvas = made("canvas", { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(picture.src);
  return canvas.toDataURL("image/jpeg", 0.95);
}

async function take(file) {
  if (!file) return;
  try {
    const asIs = file.size <= SENT_AS_IS && FORMATS.includes(file.type);
    const input = asIs ? await dataUri(file) : await redrawn(file);
    show(input, `the image ${file.name || "that was pasted"}`);
    query = { input };
    await search();
  } catch (error) {
    say(error.message, true);
  }
}

async function takeItem(number) {
  const focused = document.activeElement;
  const item = await get(`v1/collection/images/${number}`);
  show(thumbnail(number), named(item));
  query = { item: number };
  mark(points.findIndex((point) => point.number === number), false);
  await search();
  const now = document.activeElement; // a list drawn anew has moved it to another button
  if (now !== focused && now !== document.body && !$("results").contains(now)) return; // who has gone on is not called back
  $("results").focus({ preventScroll: true });
  $("ask").scrollIntoView({ block: "start" });
}

function show(source, text) {
  $("photo").src = source;
  $("photo").alt = text;
  $("photo").hidden = false;
  $("drop-text").textContent = "Choose another image";
}

// ---- searching -------------------------------------------------------------------------------------------------------

async function search() {
  if (query === null || collection === null) return;
  running?.abort();
  const mine = (running = new AbortController());
  const model = $("model").value;
  say("Searching …");
  $("results").setAttribute("aria-busy", "true");
  try {
    const start = performance.now();
    const found = await get("v1/search", {
      method: "POST",
      signal: mine.signal,
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model, k: Number($("count").value), ...query }),
    });
    list(found, model);
    say(summary(found, model, ((performance.now() - start) / 1000).toFixed(2)));
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  } finally {
    if (running === mine) $("results").removeAttribute("aria-busy");
  }
}

function list(found, model) {
  const [frozen, masked] = [found.neighbours.frozen ?? null, model === "frozen" ? null : found.neighbours[model] ?? null];
  fill($("frozen"), frozen ?? [], masked);
  fill($("mask"), masked ?? [], frozen);
  $("mask-title").textContent = model === "frozen" ? "Mask" : `Mask ${model}`;
  note("frozen-note", frozen === null ? found.note : "");
  note("mask-note", masked !== null ? "" : model === "frozen" ? "Choose a mask to compare with." : found.note);
  $("results").hidden = false;
  near([...(frozen ?? []), ...(masked ?? [])].map((item) => item.number));
}

function note(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

function summary(found, model, seconds) {
  const [frozen, masked] = [found.neighbours.frozen, found.neighbours[model]];
  const words = [`Nearest of ${collection.images.toLocaleString("en")} images, in ${seconds} s.`];
  if (frozen && masked && model !== "frozen") {
    const both = new Set(frozen.map((item) => item.number));
    const same = masked.filter((item) => both.has(item.number)).length;
    words.push(same === masked.length ? "Both lists have the same images." : `${same} of ${masked.length} are in both lists; the others have a frame.`);
  }
  const power = collection.spaces.find((space) => Object.values(found.spaces).includes(space.name))?.power;
  if (power !== null && power !== undefined) words.push(`Vectors are whitened (power ${Number(power.toFixed(2))}).`);
  return words.join(" ");
}

function fill(place, items, others) {
  const elsewhere = others && new Set(others.map((item) => item.number));
  const focused = [...place.querySelectorAll("button")].indexOf(document.activeElement);
  place.replaceChildren(
    ...items.map((item) => {
      const only = Boolean(elsewhere) && !elsewhere.has(item.number);
      const image = made("img", { src: thumbnail(item.number), alt: "", loading: "lazy" });
      const text = made("span", { className: "name" }, made("b", {}, item.similarity.toFixed(3)), ` ${item.label ?? item.name}`);
      const button = made("button", { type: "button", title: item.name }, image, text);
      button.setAttribute("aria-label", `${named(item)}, similarity ${item.similarity.toFixed(3)}${only ? ", only here" : ""}: search for it`);
      button.addEventListener("click", () => takeItem(item.number).catch((error) => say(error.message, true)));
      return made("li", { className: only ? "only" : "" }, button);
    }),
  );
  if (focused >= 0) place.querySelectorAll("button")[Math.min(focused, items.length - 1)]?.focus();
}

// ---- the plane -------------------------------------------------------------------------------------------------------

async function drawPlane() {
  const number = Number($("space").value);
  const plane = await get(`v1/collection/planes/${number}`);
  points = plane.points.map(([x, y], i) => ({ x: 3 + 94 * x, y: 3 + 46 * y, number: plane.numbers[i], label: plane.labels?.[i] ?? null }));
  circles = points.map((point) => {
    const circle = document.createElementNS(SVG, "circle");
    circle.setAttribute("cx", point.x.toFixed(2));
    circle.setAttribute("cy", point.y.toFixed(2));
    if (point.label !== null && point.label < HUES) circle.setAttribute("class", `hue-${point.label}`);
    return circle;
  });
  $("plane").replaceChildren(...circles);
  near(shown);
  mark(-1);
}

function legend(classes) {
  if (!classes || classes.length > HUES) return;
  $("classes").replaceChildren(
    ...classes.map((name, i) => {
      const dot = document.createElementNS(SVG, "svg");
      dot.setAttribute("viewBox", "0 0 10 10");
      dot.setAttribute("aria-hidden", "true");
      const circle = document.createElementNS(SVG, "circle");
      for (const key of ["cx", "cy", "r"]) circle.setAttribute(key, 5);
      circle.setAttribute("class", `hue-${i}`);
      dot.append(circle);
      return made("li", {}, dot, name);
    }),
  );
}

let shown = [];
function near(numbers) {
  shown = numbers;
  const found = new Set(numbers);
  circles.forEach((circle, i) => {
    const is = found.has(points[i].number);
    circle.classList.toggle("near", is);
    circle.setAttribute("r", is ? 0.9 : points.length > 500 ? 0.5 : 0.8);
    if (is) $("plane").append(circle); // on top
  });
}

let peeked = 0;
async function mark(i, tell = true) {
  const turn = ++peeked;
  $("plane").querySelector(".at")?.classList.remove("at");
  at = i;
  circles[i]?.classList.add("at");
  if (i < 0 || !tell) return peek(null);
  $("peek").setAttribute("aria-busy", "true"); // what it shows is of the point before
  const item = await get(`v1/collection/images/${points[i].number}`).catch(() => null);
  if (turn === peeked) peek(item);
}

function peek(item) {
  const [image, caption] = $("peek").children;
  $("peek").removeAttribute("aria-busy");
  image.hidden = item === null;
  caption.textContent = item === null ? "" : named(item);
  if (item !== null) image.src = thumbnail(item.number);
}

function nearestTo(event, most) {
  const box = $("plane").getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * 100;
  const y = ((event.clientY - box.top) / box.height) * 52;
  const away = points.map((point) => Math.hypot(point.x - x, point.y - y));
  const best = away.indexOf(Math.min(...away));
  return best >= 0 && (away[best] / 100) * box.width <= most ? best : -1;
}

const WAYS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

function step([dx, dy]) {
  if (at < 0) return points.length ? 0 : -1;
  const here = points[at];
  let best = at;
  let least = Infinity;
  points.forEach((point, i) => {
    const [x, y] = [point.x - here.x, point.y - here.y];
    const ahead = x * dx + y * dy;
    const aside = Math.abs(x * dy) + Math.abs(y * dx);
    if (i !== at && ahead > 0 && ahead + 3 * aside < least) [best, least] = [i, ahead + 3 * aside];
  });
  return best;
}

// ---- the masks -------------------------------------------------------------------------------------------------------

function verdict(model) {
  if (model.problem) return ["cannot be used", "worse"];
  if (model.kind === "backbone") return ["the backbone itself", ""];
  if (model.kept === "identity") return ["gained nothing: leaves the backbone as it is", ""];
  if (typeof model.quality_before === "number" && typeof model.quality_after === "number") {
    const gain = model.quality_after - model.quality_before;
    const words = `${gain >= 0 ? "better" : "worse"}: quality ${model.quality_before.toFixed(3)} → ${model.quality_after.toFixed(3)}`;
    return [words, gain >= 0 ? "better" : "worse"];
  }
  return ["not measured", ""];
}

function bytes(count) {
  return !count ? "" : count < 1e6 ? `${Math.ceil(count / 1e3).toLocaleString("en")} kB` : `${(count / 1e6).toFixed(1)} MB`;
}

function listMasks() {
  $("masks").replaceChildren(
    ...models.map((model) => {
      const [words, look] = verdict(model);
      const fits = collection?.models[model.id];
      const cells = [model.kind, bytes(model.bytes), words, model.base ?? "not said", fits ? "indexed" : collection ? "not indexed" : ""];
      const row = made("tr", {}, made("th", { scope: "row" }, model.id), ...cells.map((text) => made("td", {}, text)));
      row.children[1].className = "wide";
      row.children[2].className = "number";
      row.children[3].className = look;
      return row;
    }),
  );
  const usable = models.filter((model) => !model.problem);
  const indexed = usable.filter((model) => collection?.models[model.id] && model.id !== "frozen");
  $("model").replaceChildren(
    ...usable.map((model) => {
      const only = collection && !collection.models[model.id] && model.id !== "frozen" ? " (not in the collection)" : "";
      return made("option", { value: model.id, selected: model.id === indexed[0]?.id }, model.id + only);
    }),
  );
  noteModel();
}

function noteModel() {
  const model = $("model").value;
  const fits = collection?.models[model];
  $("model-note").textContent =
    collection === null || fits || model === "frozen" ? "" : `The collection has no vectors of ${model}: only the frozen backbone can search it.`;
}

// ---- beginning -------------------------------------------------------------------------------------------------------

function listen() {
  $("file").addEventListener("change", (event) => take(event.target.files[0]));
  $("model").addEventListener("change", () => (noteModel(), search()));
  $("count").addEventListener("change", search);
  $("space").addEventListener("change", () => drawPlane().catch((error) => say(error.message, true)));
  const drop = $("drop");
  for (const kind of ["dragenter", "dragover"])
    drop.addEventListener(kind, (event) => (event.preventDefault(), drop.classList.add("over")));
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => (event.preventDefault(), take(event.dataTransfer.files[0])));
  for (const kind of ["dragover", "drop"]) window.addEventListener(kind, (event) => event.preventDefault());
  window.addEventListener("paste", (event) => take(event.clipboardData.files[0]));
  const plane = $("plane");
  plane.addEventListener("pointermove", (event) => {
    const found = event.pointerType === "mouse" ? nearestTo(event, 12) : -1;
    if (found >= 0 && found !== at) mark(found);
  });
  plane.addEventListener("click", (event) => {
    const found = nearestTo(event, 24);
    if (found >= 0) takeItem(points[found].number).catch((error) => say(error.message, true));
  });
  plane.addEventListener("keydown", (event) => {
    if (event.key in WAYS) mark(step(WAYS[event.key]));
    else if ((event.key === "Enter" || event.key === " ") && at >= 0) takeItem(points[at].number).catch((error) => say(error.message, true));
    else return;
    event.preventDefault();
  });
}

async function begin() {
  listen();
  try {
    [models, collection] = await Promise.all([get("v1/models").then((found) => found.data), get("v1/collection")]);
    if (!collection.images) collection = null;
  } catch (error) {
    return say(error.message, true);
  }
  listMasks();
  const base = models.find((model) => model.kind === "backbone")?.base ?? "one backbone";
  const masks = models.length - 1;
  $("about").textContent = `${base}, ${masks.toLocaleString("en")} ${masks === 1 ? "mask" : "masks"}` + (collection ? `, ${collection.images.toLocaleString("en")} images of ${collection.title}` : "");
  if (collection === null) {
    $("file").disabled = true;
    $("drop-text").textContent = "There is no collection to search: start the server with --index FOLDER.";
    return;
  }
  $("space").replaceChildren(...collection.spaces.map((each, i) => made("option", { value: i }, each.name)));
  $("plane-section").hidden = !collection.spaces.some((each) => each.plane);
  if (!$("plane-section").hidden) {
    legend(collection.classes);
    await drawPlane().catch((error) => say(error.message, true));
  }
  document.body.dataset.ready = "yes";
}

begin();
