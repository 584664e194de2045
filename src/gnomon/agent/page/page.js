// Long texts fold, keys and links go from turn to turn and from attempt to attempt, the matrix can be searched. All of it works offline.
"use strict";
for (const text of document.querySelectorAll("[data-fold]")) {
  if (text.scrollHeight < 460) continue;
  text.classList.add("fold");
  const more = document.createElement("button");
  more.className = "more";
  const say = () => { more.textContent = text.classList.contains("open") ? "show less" : `show all ${text.dataset.fold}`; };
  more.onclick = () => { text.classList.toggle("open"); say(); };
  say();
  text.after(more);
}

const turns = [...document.querySelectorAll(".turn")];
const marks = new Map([...document.querySelectorAll(".strip a")].map((mark) => [mark.hash.slice(1), mark]));
let here = -1;
function at(number) {
  marks.get(turns[here]?.id)?.classList.remove("here");
  here = number;
  marks.get(turns[here]?.id)?.classList.add("here");
}
if (turns.length) {
  addEventListener("scroll", () => {
    const line = 120;
    let now = 0;
    turns.forEach((turn, i) => { if (turn.getBoundingClientRect().top < line) now = i; });
    if (now !== here) at(now);
  }, { passive: true });
}
function jump(by) {
  if (!turns.length) return;
  const to = Math.min(Math.max(here + by, 0), turns.length - 1);
  turns[to].scrollIntoView();
  at(to);
}

const attempts = window.ATTEMPTS || [];
const body = document.body.dataset;
const index = attempts.findIndex((each) => each.page === body.page);
function neighbour(by) { return index < 0 ? undefined : attempts[index + by]; }
for (const [id, by] of [["previous", -1], ["next", 1]]) {
  const link = document.getElementById(id), other = neighbour(by);
  if (!link) continue;
  if (other) { link.href = body.root + other.page; link.title = other.title; } else { link.style.visibility = "hidden"; }
}
const siblings = document.getElementById("siblings");
if (siblings && index >= 0) {
  for (const each of attempts.filter((other) => other.task === attempts[index].task)) {
    const link = document.createElement("a");
    link.className = `cell ${each.look}`;
    link.href = body.root + each.page;
    link.title = each.title;
    link.textContent = each.text;
    if (each.page === body.page) link.style.outline = "2px solid var(--accent)";
    siblings.append(link, " ");
  }
}
addEventListener("keydown", (event) => {
  if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "j") jump(1);
  if (event.key === "k") jump(-1);
  if (event.key === "n" && neighbour(1)) location.href = body.root + neighbour(1).page;
  if (event.key === "p" && neighbour(-1)) location.href = body.root + neighbour(-1).page;
});

const search = document.getElementById("search"), unequal = document.getElementById("unequal");
function filter() {
  for (const line of document.querySelectorAll(".matrix tr[data-task]")) {
    line.hidden = !line.dataset.task.toLowerCase().includes(search.value.toLowerCase()) || (unequal.checked && !line.dataset.unequal);
  }
}
if (search) { search.oninput = filter; unequal.onchange = filter; filter(); }
