// The chat page: a conversation as a tree, so that an edit or another try is a branch and nothing is lost.
// All text from people and models goes into text nodes; nothing is ever parsed as HTML. No request leaves this server.

const $ = (id) => document.getElementById(id);
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
const button = (text, title, act) => {
  const element = make("button", "", text);
  element.type = "button";
  element.title = title;
  element.addEventListener("click", act);
  return element;
};
const kept = (store, name) => { try { return store.getItem(name); } catch { return null; } };
const keep = (store, name, value) => { try { store.setItem(name, value); } catch { /* private windows and full stores do without */ } };

// --- the conversation: each node knows its parent, its children and which child is shown ---------------------------------------------

const fresh = () => ({ role: "root", children: [], shown: 0, parent: null });
let root = fresh();
let model = null;
let running = null; // { node, abort }

const add = (parent, fields) => {
  const node = { children: [], shown: 0, parent, ...fields };
  parent.children.push(node);
  parent.shown = parent.children.length - 1;
  return node;
};
const path = () => {
  const nodes = [];
  for (let node = root.children[root.shown]; node; node = node.children[node.shown]) nodes.push(node);
  return nodes;
};
const above = (node) => {
  const nodes = [];
  for (let at = node; at && at.role !== "root"; at = at.parent) nodes.unshift(at);
  return nodes;
};

function store() {
  const plain = (node) => ({ role: node.role, text: node.text, reasoning: node.reasoning, calls: node.calls, call: node.call, usage: node.usage,
    reason: node.reason, error: node.error, seconds: node.seconds, first: node.first, shown: node.shown, children: node.children.map(plain) });
  keep(sessionStorage, "conversation", JSON.stringify(plain(root)));
}

function restore() {
  const saved = kept(sessionStorage, "conversation");
  if (!saved) return;
  const linked = (node, parent) => { node.parent = parent; node.children.forEach((child) => linked(child, node)); return node; };
  try { root = linked(JSON.parse(saved), null); } catch { root = fresh(); }
}

// --- drawing -------------------------------------------------------------------------------------------------------------------------

const log = $("log");
const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;

function draw() {
  const follow = atEnd();
  const nodes = path();
  log.replaceChildren(...(nodes.length ? nodes.map(drawn) : [welcome()]));
  if (follow) log.scrollTop = log.scrollHeight;
  const busy = running !== null;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  document.body.dataset.state = busy ? "busy" : "ready";
}

function welcome() {
  const box = make("div", "welcome");
  box.append(document.querySelector(".mark").cloneNode(true), make("p", "", "What would you like to talk about?"));
  return box;
}

function drawn(node) {
  const article = make("article", node.role);
  node.element = article;
  fill(node);
  return article;
}

function fill(node) {
  const article = node.element;
  if (!article) return;
  const live = running?.node === node;
  const parts = [];
  if (node.reasoning) {
    const details = make("details", "thinking");
    const words = live && !node.text && !node.calls?.length ? "Thinking…" : "Thought";
    const summary = make("summary", "", words);
    summary.addEventListener("click", () => { node.folded = details.open; }); // before it turns
    details.append(summary, make("div", "", node.reasoning));
    details.open = node.folded === undefined ? live && !node.text : !node.folded;
    parts.push(details);
  }
  const body = make("div", live ? "body waiting" : "body");
  if (node.role === "assistant") body.append(...blocks(node.text || ""));
  else body.textContent = node.text;
  if (node.text || live || node.role !== "assistant") parts.push(body);
  for (const call of node.calls || []) parts.push(drawnCall(node, call, live));
  if (node.error) parts.push(make("p", "error", node.error));
  parts.push(foot(node, live));
  article.replaceChildren(...parts);
}

function drawnCall(node, call, live) {
  const box = make("div", "call");
  let shown = call.arguments;
  try { shown = JSON.stringify(JSON.parse(call.arguments), null, 2); } catch { /* not whole yet */ }
  const pre = make("pre", "", shown);
  box.append(make("b", "", call.name), pre);
  if (!live && !node.children.length) {
    const answer = make("textarea");
    answer.placeholder = "What the tool answers; then press Enter";
    answer.rows = 1;
    answer.setAttribute("aria-label", `Result of ${call.name}`);
    answer.value = call.draft || "";
    answer.addEventListener("input", () => { call.draft = answer.value; });
    answer.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); giveResults(node); }
    });
    box.append(answer);
  }
  return box;
}

// Fenced code, inline code and bold; everything else stands as it was written.
function blocks(text) {
  const found = [];
  const parts = text.split(/^```/m);
  parts.forEach((part, index) => {
    if (index % 2) {
      const pre = make("pre");
      pre.append(make("code", "", part.replace(/^[^\n]*\n?/, "").replace(/\n$/, "")));
      found.push(pre);
    } else {
      for (const paragraph of part.split(/\n{2,}/)) if (paragraph.trim()) found.push(lined(paragraph.replace(/^\n+|\n+$/g, "")));
    }
  });
  return found;
}

function lined(text) {
  const line = make("p");
  for (const piece of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`[^`]+`$/.test(piece)) line.append(make("code", "", piece.slice(1, -1)));
    else if (/^\*\*[^*]+\*\*$/.test(piece)) line.append(make("b", "", piece.slice(2, -2)));
    else line.append(piece);
  }
  return line;
}

function foot(node, live) {
  const line = make("div", "foot");
  const siblings = node.parent.children;
  if (siblings.length > 1) {
    const at = siblings.indexOf(node);
    const turn = (step) => { node.parent.shown = at + step; store(); draw(); };
    const branch = make("span", "branch");
    const back = button("‹", "The branch before", () => turn(-1));
    const on = button("›", "The next branch", () => turn(1));
    back.disabled = at === 0 || running !== null;
    on.disabled = at === siblings.length - 1 || running !== null;
    branch.append(back, `${at + 1}/${siblings.length}`, on);
    line.append(branch);
  }
  if (live) return line;
  if (node.role === "user") line.append(button("Edit", "Change this message; the answer so far stays in another branch", () => edit(node)));
  if (node.role === "assistant") {
    line.append(button("Again", "Another answer, in a branch of its own", () => { if (!running) answer(node.parent); }));
    if (node.text) line.append(button("Copy", "Copy the answer", () => navigator.clipboard?.writeText(node.text)));
    line.append(...numbers(node));
  }
  return line;
}

function numbers(node) {
  const found = [];
  const say = (text, title, name) => { const span = make("span", name, text); if (title) span.title = title; found.push(span); };
  const usage = node.usage;
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens || 0;
    say(`${usage.prompt_tokens} tokens in`);
    say(`${cached} cached`, usage.prompt_tokens_details?.cache_note || "", "cached");
    say(`${usage.completion_tokens} out`);
    if (node.first) say(`${node.first.toFixed(2)} s to the first`);
    const rest = node.seconds - node.first;
    if (usage.completion_tokens > 1 && rest > 0) say(`${((usage.completion_tokens - 1) / rest).toFixed(1)} tokens/s`);
  }
  if (node.reason && !["stop", "tool_calls"].includes(node.reason)) say({ length: "cut at the limit", stopped: "stopped" }[node.reason] || node.reason);
  return found;
}

function edit(node) {
  if (running) return;
  const box = make("form", "edit");
  const area = make("textarea");
  area.value = node.text;
  area.rows = Math.min(12, node.text.split("\n").length + 1);
  area.setAttribute("aria-label", "Edited message");
  const row = make("div", "row");
  const cancel = button("Cancel", "Leave it as it was (Esc)", () => draw());
  cancel.className = "plain";
  const send = make("button", "", "Send");
  row.append(cancel, send);
  box.append(area, row);
  const submit = (event) => {
    event.preventDefault();
    const text = area.value.trim();
    if (text) answer(add(node.parent, { role: "user", text }));
  };
  box.addEventListener("submit", submit);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape") { event.stopPropagation(); draw(); $("text").focus(); }
  });
  node.element.replaceChildren(box);
  area.focus();
}

// --- asking --------------------------------------------------------------------------------------------------------------------------

function asked(parent) {
  const messages = [];
  const system = $("system").value.trim();
  if (system) messages.push({ role: "system", content: system });
  for (const node of above(parent)) {
    if (node.role === "tool") messages.push({ role: "tool", tool_call_id: node.call, content: node.text });
    else if (node.role === "user") messages.push({ role: "user", content: node.text });
    else {
      const message = { role: "assistant", content: node.text || "" };
      if (node.reasoning) message.reasoning_content = node.reasoning;
      const calls = (node.calls || []).filter((call) => call.whole !== false);
      if (calls.length) message.tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      messages.push(message);
    }
  }
  const body = { model: model?.id, messages, stream: true, stream_options: { include_usage: true } };
  if ($("effort").value) body.reasoning_effort = $("effort").value;
  const tools = $("tools").value.trim();
  if (tools) body.tools = JSON.parse(tools);
  for (const [id, name] of [["temperature", "temperature"], ["tokens", "max_tokens"], ["seed", "seed"]]) {
    if ($(id).value !== "") body[name] = Number($(id).value);
  }
  return body;
}

async function answer(parent) {
  if (running) return;
  let body;
  const node = add(parent, { role: "assistant", text: "", reasoning: "", calls: [] });
  try { body = asked(parent); } catch (error) { node.error = `The tools are not JSON: ${error.message}`; store(); draw(); return; }
  running = { node, abort: new AbortController() };
  log.scrollTop = log.scrollHeight;
  draw();
  log.scrollTop = log.scrollHeight;
  const began = performance.now();
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.abort.signal });
    if (!response.ok) throw new Error(await reason(response));
    for await (const data of events(response.body)) {
      if (data.error) throw new Error(data.error.message);
      take(node, data, began);
    }
  } catch (error) {
    if (error.name === "AbortError") node.reason = "stopped";
    else node.error = error instanceof TypeError ? `The server cannot be reached: ${error.message}` : error.message;
  }
  node.seconds = (performance.now() - began) / 1000;
  for (const call of node.calls) if (node.reason !== "tool_calls") call.whole = false;
  running = null;
  clearTimeout(drawing); // a drawing on its way would take the focus from a field of the finished message
  drawing = 0;
  store();
  draw();
  if (matchMedia("(hover: hover)").matches) $("text").focus();
}

function take(node, data, began) {
  if (data.usage) node.usage = data.usage;
  const choice = data.choices?.[0];
  if (!choice) return;
  const delta = choice.delta || {};
  if (node.first === undefined && (delta.content || delta.reasoning_content || delta.tool_calls)) node.first = (performance.now() - began) / 1000;
  node.reasoning += delta.reasoning_content || "";
  node.text += delta.content || "";
  for (const call of delta.tool_calls || []) {
    const known = node.calls[call.index] ||= { id: call.id, name: call.function?.name || "", arguments: "" };
    known.arguments += call.function?.arguments || "";
  }
  if (choice.finish_reason) node.reason = choice.finish_reason;
  later(node);
}

let drawing = 0;
function later(node) {
  if (drawing) return;
  drawing = setTimeout(() => {
    drawing = 0;
    const follow = atEnd();
    fill(node);
    if (follow) log.scrollTop = log.scrollHeight;
  }, 40);
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off: its end never came");
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

async function reason(response) {
  const text = await response.text();
  let message = text.slice(0, 300) || response.statusText;
  try { message = JSON.parse(text).error.message; } catch { /* not ours: show it as it is */ }
  const wait = response.headers.get("retry-after");
  if (response.status === 401) { show(true); $("key").focus(); }
  return `${response.status}: ${message}${wait ? ` (again in ${wait} s)` : ""}`;
}

const headers = () => {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

function giveResults(node) {
  if (running || node.calls.some((call) => call.draft === undefined)) return;
  let last = node;
  for (const call of node.calls) last = add(last, { role: "tool", call: call.id, text: call.draft });
  answer(last);
}

// --- the controls --------------------------------------------------------------------------------------------------------------------

const text = $("text");
const fit = () => { text.style.height = "auto"; text.style.height = `${Math.min(text.scrollHeight + 2, innerHeight * 0.4)}px`; };
text.addEventListener("input", fit);

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = text.value.trim();
  if (!words || running) return;
  text.value = "";
  fit();
  const nodes = path();
  answer(add(nodes.length ? nodes[nodes.length - 1] : root, { role: "user", text: words }));
});

text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("composer").requestSubmit(); }
  if (event.key === "ArrowUp" && text.value === "") {
    const last = path().filter((node) => node.role === "user").pop();
    if (last) { event.preventDefault(); edit(last); }
  }
});

const stop = () => running?.abort.abort();
$("stop").addEventListener("click", stop);

function restart() {
  stop();
  root = fresh();
  store();
  draw();
  text.focus();
}
$("new").addEventListener("click", restart);

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "O" && event.ctrlKey && event.shiftKey) { event.preventDefault(); restart(); }
  if (event.key === "/" && !/^(TEXTAREA|INPUT|SELECT)$/.test(document.activeElement?.tagName || "")) { event.preventDefault(); text.focus(); }
});

function show(open) {
  $("panel").hidden = !open;
  $("options").setAttribute("aria-expanded", String(open));
}
$("options").addEventListener("click", () => show($("panel").hidden));

const themes = ["", "light", "dark"];
const dress = (theme) => { document.documentElement.dataset.theme = theme; $("theme").title = `Theme: ${theme || "as the system"}`; };
dress(kept(localStorage, "theme") || "");
$("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme || "") + 1) % themes.length];
  keep(localStorage, "theme", next);
  dress(next);
});

for (const id of ["effort", "system", "tools", "temperature", "tokens"]) {
  $(id).value = kept(localStorage, id) || "";
  $(id).addEventListener("change", () => keep(localStorage, id, $(id).value));
}
$("key").value = kept(sessionStorage, "key") || "";
$("key").addEventListener("change", () => { keep(sessionStorage, "key", $("key").value); meet(); });

async function meet() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await reason(response));
    model = (await response.json()).data[0];
    $("model").textContent = model.id;
    $("context").textContent = `${model.max_model_len.toLocaleString()} tokens of context`;
    document.title = `${model.id} · gnomon`;
    document.body.dataset.model = model.id;
  } catch (error) {
    $("model").textContent = "no model";
    $("context").textContent = error.message;
  }
}

restore();
draw();
meet();
