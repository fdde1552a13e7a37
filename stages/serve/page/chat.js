// The page: a conversation with the server it came from.

import { Answer, element } from "./answer.js";
import { ApiError, getJson, streamEvents } from "./stream.js";

const KEY = "eagle-api-key";
const COMPARABLE = 20; // tokens; the times of shorter answers are mostly chance

const $ = (id) => document.getElementById(id);
const conversation = $("conversation");
let key = sessionStorage.getItem(KEY) ?? "";
let messages = []; // the conversation so far, as the API takes it
let speculativeFirst = true;
let running = null; // the AbortController of the answer under way

async function findModel() {
  try {
    const model = (await getJson("v1/models", key)).data[0];
    $("model").textContent = `${model.id}, ${model.max_model_len} tokens of context`;
    $("key-form").hidden = true;
  } catch (error) {
    if (!askForKey(error)) $("model").textContent = error.message;
  }
}

/** Shows the field for the key if that is what is missing. */
function askForKey(error) {
  if (error.status !== 401) return false;
  $("model").textContent = "waiting for the API key";
  $("key-form").hidden = false;
  $("key").focus();
  if (key) $("status").textContent = "The server does not know this key.";
  return true;
}

function request(question, seed) {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? undefined : $(id).valueAsNumber);
  return {
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages,
      { role: "user", content: question },
    ],
    temperature: number("temperature"),
    max_tokens: number("limit"),
    seed: number("seed") ?? seed,
    stream: true,
    stream_options: { include_usage: true },
    return_speculation: true,
  };
}

async function run(answer, body, signal) {
  answer.begin();
  let first = true;
  for await (const event of streamEvents("v1/chat/completions", body, key, signal)) {
    if (first) noticeOthers(answer);
    first = false;
    if (event.usage) answer.settle(event.usage);
    for (const choice of event.choices) {
      if (choice.speculation) answer.add(choice.speculation);
      if (choice.finish_reason) answer.finishReason = choice.finish_reason;
    }
  }
}

async function noticeOthers(answer) {
  try {
    answer.shared ||= (await getJson("health")).running > 1;
  } catch {
    // The answer itself will tell that the server is gone.
  }
}

async function ask(question) {
  const mode = document.querySelector("input[name=mode]:checked").value;
  const both = mode === "both";
  const kinds = both ? [true, false] : [mode === "on"];
  const body = request(question, crypto.getRandomValues(new Uint32Array(1))[0]);
  const turn = element("div", "turn");
  const columns = element("div", "answers");
  const asked = element("div", "question", question);
  const answers = kinds.map((on) => new Answer(on, both ? `Drafts ${on ? "on" : "off"}` : "", follow));
  columns.append(...answers.map((answer) => answer.node));
  turn.append(asked, columns);
  $("welcome").hidden = true;
  conversation.append(turn);
  conversation.scrollTop = conversation.scrollHeight;

  running = new AbortController();
  busy(true);
  const order = both && !speculativeFirst ? [1, 0] : [0, 1].slice(0, kinds.length);
  if (both) speculativeFirst = !speculativeFirst;
  let failure = null;
  for (const i of order) {
    const which = both ? `, drafts ${kinds[i] ? "on" : "off"}` : "";
    $("status").textContent = `Answering${which}. Escape stops.`;
    try {
      await run(answers[i], { ...body, speculative: kinds[i] }, running.signal);
    } catch (error) {
      failure = error;
      if (error.name === "AbortError") answers[i].note("Stopped.");
      else if (error instanceof ApiError) answers[i].fail(error.message);
      else throw error;
    } finally {
      answers[i].end();
    }
    if (failure) break;
  }
  answers.filter((each) => each.waiting).forEach((each) => each.skip());
  running = null;
  busy(false);
  $("status").textContent = "";
  conclude(turn, question, answers, failure, both);
}

/** Takes the turn into the conversation, or gives the question back where nothing came of it. */
function conclude(turn, question, answers, failure, both) {
  const answer = answers.find((each) => each.text) ?? answers[0];
  if (failure && !answer.text) {
    if (failure.status === 401) {
      turn.remove();
      $("welcome").hidden = messages.length > 0;
    }
    if (!$("message").value) $("message").value = question;
    askForKey(failure);
    return;
  }
  if (both && !failure) {
    const verdict = element("p", "verdict", compared(...answers));
    turn.append(verdict);
    follow();
  }
  messages.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
  $("spoken").textContent = answer.text;
}

function compared(on, off) {
  const same = on.text === off.text ? "Same text." : "The texts differ.";
  const enough = Math.min(on.meter.tokens, off.meter.tokens) >= COMPARABLE;
  if (!enough || !on.meter.rate || !off.meter.rate)
    return `${same} Too short to compare the times.`;
  const [fast, plain] = [on.meter.rate, off.meter.rate];
  const rates = `${fast.toFixed(1)} against ${plain.toFixed(1)} tokens/s`;
  return `${same} With drafts ${(fast / plain).toFixed(2)} times as fast: ${rates}.`;
}

/** Keeps the end in sight, unless the reader has scrolled up. */
function follow() {
  const below = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight;
  if (below < 120) conversation.scrollTop = conversation.scrollHeight;
}

function busy(yes) {
  $("stop").hidden = !yes;
  $("send").disabled = yes;
  $("fresh").disabled = yes;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("message").value;
  if (running || !question.trim() || !$("composer").reportValidity()) return;
  $("message").value = "";
  ask(question);
});

$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem(KEY, key);
  $("key").value = "";
  $("status").textContent = "";
  findModel().then(() => $("key-form").hidden && $("message").focus());
});

$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());

$("fresh").addEventListener("click", () => {
  messages = [];
  conversation.querySelectorAll(".turn").forEach((turn) => turn.remove());
  $("welcome").hidden = false;
  $("spoken").textContent = "";
  $("message").focus();
});

findModel();
