"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];
const tree = document.getElementById("tree");
const asking = all("[data-asks]", tree);
const byDetail = new Map(asking.map((one) => [one.dataset.asks, one]));

function opened(element) {
  for (let box = element.closest(".box"); box; box = box.parentElement.closest(".box"))
    if (element.closest(".line")?.parentElement !== box) fold(box, false);
}

function fold(box, closed) {
  box.classList.toggle("closed", closed);
  const button = box.querySelector(":scope > .line .fold");
  if (button) button.setAttribute("aria-expanded", String(!closed));
}

function ask(element, move) {
  for (const one of all(".chosen", tree)) one.classList.remove("chosen");
  for (const one of all("#panel article")) one.hidden = one.id !== element.dataset.asks;
  document.getElementById("hint").hidden = true;
  document.body.classList.add("asked");
  document.getElementById("panel").scrollTop = 0;
  element.classList.add("chosen");
  history.replaceState(null, "", "#" + element.dataset.asks);
  if (move) {
    opened(element);
    element.scrollIntoView({ block: "center" });
  }
}

tree.addEventListener("click", (event) => {
  const button = event.target.closest(".fold");
  if (button) {
    const box = button.closest(".box");
    return fold(box, !box.classList.contains("closed"));
  }
  const element = event.target.closest("[data-asks]");
  if (element) ask(element, false);
});
tree.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" && event.key !== " ") return;
  if (event.target.matches("[data-asks]")) {
    event.preventDefault();
    ask(event.target, false);
  }
});
document.getElementById("close").addEventListener("click", () => {
  for (const box of all(".box .box", tree)) fold(box, true);
});
document.getElementById("open").addEventListener("click", () => {
  for (const box of all(".box", tree)) fold(box, false);
});

const search = document.getElementById("search");
let found = [], at = -1;
function look() {
  const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  found = words.length ? asking.filter((one) => words.every((word) => one.dataset.words.includes(word))) : [];
  at = -1;
  tree.classList.toggle("searching", words.length > 0);
  for (const one of asking) one.classList.remove("found", "current");
  for (const one of found) { one.classList.add("found"); opened(one); }
  document.getElementById("count").textContent = words.length ? `${found.length} found` : "";
}
function step(by) {
  if (!found.length) return;
  if (at >= 0) found[at].classList.remove("current");
  at = (at + by + found.length) % found.length;
  found[at].classList.add("current");
  ask(found[at], true);
  document.getElementById("count").textContent = `${at + 1} of ${found.length}`;
}
search.addEventListener("input", look);
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); step(event.shiftKey ? -1 : 1); }
  if (event.key === "Escape") { search.value = ""; look(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== search) { event.preventDefault(); search.focus(); }
});

function go() {
  const element = byDetail.get(location.hash.slice(1));
  if (element) ask(element, true);
}
window.addEventListener("hashchange", go);
go();
