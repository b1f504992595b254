// The state of the page, and the function that changes it. After a change the page is drawn once, in the next frame.

export const state = {
  view: "draw",
  keyShown: false, // whether the API key's dialog is open
  keyFailure: "", // why the newest key was not accepted
  hasKey: false,
  connection: "unknown", // "unknown", "ok", "away" (the service), "gateway" (behind it)
  notice: "", // read aloud by screen readers
  models: [],
  loras: [],
  controlnets: [],
  errors: {}, // by field of the API
  failure: "", // what went wrong with the newest request
  job: null, // the job that is being drawn, or was last
  source: null, // the picture to edit: {blob, url, width, height, name}
  shapes: [], // of the mask
  brush: { size: 12, erases: false },
  history: { jobs: [], next: "", loaded: false, failure: "" },
  selected: null, // a job of the history, with its timeline
  fleet: null,
};

let draw = () => {};
let isDue = false;

export function onChange(render) {
  draw = render;
}

export function update(changes = {}) {
  Object.assign(state, changes);
  if (isDue) return;
  isDue = true;
  queueMicrotask(() => {
    isDue = false;
    draw();
  });
}

// Scroll to a part of the page where it has one column.
export function reveal(selector) {
  if (matchMedia("(max-width: 820px)").matches) document.querySelector(selector)?.scrollIntoView({ block: "nearest" });
}

// Say something to people who use a screen reader, and show it in the bar of messages.
export function say(notice) {
  update({ notice });
}
