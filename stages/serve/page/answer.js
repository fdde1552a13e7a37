// One answer on the page: its text as it comes, what was drafted marked, and the counts below.
// Text is only ever set as text, so nothing a model or a person writes becomes markup.

import { Meter } from "./stream.js";

/** A new element with a class and a text. */
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export class Answer {
  meter = new Meter();
  waiting = true;
  text = "";
  drafted = 0;
  shared = false;
  finishReason = null;
  #body = element("div", "text");
  #counts = element("dl", "counts");
  #values = {};
  #run = null;
  #pending = [];
  #speculative;
  #follow;

  /** `title` is shown above, if any; `follow` is called when the text has grown. */
  constructor(speculative, title, follow) {
    this.#speculative = speculative;
    this.#follow = follow;
    this.node = element("article", "answer");
    this.node.setAttribute("aria-label", speculative ? "Answer, drafts on" : "Answer, drafts off");
    this.node.setAttribute("aria-busy", "true");
    if (title) this.node.append(element("h2", "", title));
    this.node.append(this.#body, this.#counts);
    const names = ["tokens/s", "accepted/step", "tokens", "first token"];
    for (const name of speculative ? names : names.filter((each) => each !== "accepted/step")) {
      const pair = element("div");
      this.#values[name] = element("dd", "", "–");
      pair.append(element("dt", "", name), this.#values[name]);
      this.#counts.append(pair);
    }
  }

  /** Called right before the request. */
  begin() {
    this.waiting = false;
  }

  /** Shows that it is not asked for after all. */
  skip() {
    this.note("Not asked.");
    this.end();
  }

  /** Takes what an event says of its tokens; the page shows it with its next frame. */
  add(step) {
    this.meter.add(step);
    this.text += step.texts.join("");
    if (!this.#pending.length) requestAnimationFrame(() => this.#draw());
    this.#pending.push(step);
  }

  /** The last event's usage. */
  settle(usage) {
    this.meter.settle(usage);
    this.drafted = usage.speculation.drafted;
  }

  /** Shows that nothing follows. */
  end() {
    this.#draw();
    this.node.setAttribute("aria-busy", "false");
    if (this.finishReason === "length") this.note("Cut at the most tokens that were asked for, or that fit.");
    if (this.finishReason && this.#speculative && !this.drafted) {
      this.note("Nothing was drafted: the server has no head, or drafting would not have paid.");
    }
    if (this.shared) this.note("Other requests ran beside this one, so its times are not its own.");
  }

  note(text) {
    this.node.append(element("p", "note", text));
  }

  fail(text) {
    const line = element("p", "note wrong", text);
    line.setAttribute("role", "alert");
    this.node.append(line);
  }

  #draw() {
    for (const { texts, accepted } of this.#pending) {
      texts.forEach((text, i) => text && this.#append(text, i < accepted));
    }
    this.#pending = [];
    const { rate, acceptedPerStep, tokens, firstSeconds } = this.meter;
    this.#show("tokens/s", rate?.toFixed(1));
    this.#show("accepted/step", acceptedPerStep?.toFixed(2));
    this.#show("tokens", tokens || null);
    this.#show("first token", firstSeconds === null ? null : `${firstSeconds.toFixed(2)} s`);
    this.#follow();
  }

  #show(name, value) {
    if (name in this.#values) this.#values[name].textContent = value ?? "–";
  }

  /** Puts text at the end, into the last run where it is of the same kind. */
  #append(text, drafted) {
    if (!this.#run || this.#run.classList.contains("drafted") !== drafted) {
      this.#run = element("span", drafted ? "drafted" : "own");
      this.#run.append("");
      this.#body.append(this.#run);
    }
    this.#run.firstChild.appendData(text);
  }
}
