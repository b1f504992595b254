// The view is in the address, behind the #, so that it can be linked to and the browser's buttons work.

import { state, update } from "./store.js";

export const VIEWS = { draw: "Draw", edit: "Edit", history: "History", fleet: "Fleet" };

const onShow = {};

// Call a function whenever a view is shown.
export function whenShown(view, load) {
  onShow[view] = load;
}

export function show(view) {
  if (location.hash === `#${view}`) follow();
  else location.hash = view;
}

function follow() {
  const asked = location.hash.slice(1);
  const view = asked in VIEWS ? asked : "draw";
  const isNew = view !== state.view;
  update({ view, failure: isNew ? "" : state.failure, errors: isNew ? {} : state.errors });
  document.title = `${VIEWS[view]} · Bottega`;
  onShow[view]?.();
}

export function startRouter() {
  addEventListener("hashchange", follow);
  follow();
}
