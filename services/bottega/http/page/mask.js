// The mask of an edit: shapes that are painted on the picture with a pointer, or added as rectangles by numbers.

import { state, update } from "./store.js";

const LEAST_CANVAS_PIXELS = 640;
const STRIPE_PIXELS = 8;

// Pixels of the canvas per pixel of the picture, so that small pictures are painted smoothly.
export function scaleOf(source) {
  return Math.max(1, Math.ceil(LEAST_CANVAS_PIXELS / source.width));
}

// A stroke is {kind: "stroke", size, erases, points: [[x, y], ...]}; a rectangle {kind: "box", x, y, width, height}.
export function addShape(shape) {
  update({ shapes: [...state.shapes, shape] });
}

export function undo() {
  update({ shapes: state.shapes.slice(0, -1) });
}

export function clear() {
  update({ shapes: [] });
}

// Draw the shapes over the picture.
export function paintOverlay(canvas) {
  const context = canvas.getContext("2d");
  const scale = scaleOf(state.source);
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.setTransform(scale, 0, 0, scale, 0, 0);
  paintShapes(context, stripes(context, scale));
}

// Stripes of black and white can be seen on every picture.
function stripes(context, scale) {
  const tile = new OffscreenCanvas(2 * STRIPE_PIXELS, 2 * STRIPE_PIXELS);
  const inside = tile.getContext("2d");
  inside.fillStyle = "#fff";
  inside.fillRect(0, 0, tile.width, tile.height);
  inside.fillStyle = "#111";
  inside.fillRect(0, 0, tile.width, STRIPE_PIXELS);
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale).rotate(45));
  return pattern;
}

function paintShapes(context, colour) {
  for (const shape of state.shapes) {
    context.globalCompositeOperation = shape.erases ? "destination-out" : "source-over";
    context.fillStyle = context.strokeStyle = colour;
    if (shape.kind === "box") context.fillRect(shape.x, shape.y, shape.width, shape.height);
    else paintStroke(context, shape);
  }
  context.globalCompositeOperation = "source-over";
}

function paintStroke(context, { size, points }) {
  context.lineWidth = size;
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  context.moveTo(...points[0]);
  for (const point of points.length > 1 ? points.slice(1) : points) context.lineTo(...point);
  context.stroke();
}

// Return the mask as the API wants it: what is painted is transparent, and drawn anew. null: nothing is painted.
export async function maskBlob(width, height) {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  paintShapes(context, "#fff");
  const painted = context.getImageData(0, 0, width, height);
  let isEmpty = true;
  for (let at = 3; at < painted.data.length; at += 4) {
    if (painted.data[at]) isEmpty = false;
    painted.data[at] = painted.data[at] > 127 ? 0 : 255;
  }
  if (isEmpty) return null;
  context.putImageData(painted, 0, 0);
  return canvas.convertToBlob({ type: "image/png" });
}

// Paint with mouse, pen or finger: the handlers of the canvas.

let stroke = null;

export function beginStroke(event) {
  if (event.button !== 0) return;
  event.preventDefault();
  const canvas = event.currentTarget;
  canvas.setPointerCapture(event.pointerId);
  const { size, erases } = state.brush;
  stroke = { kind: "stroke", size: (size / 100) * state.source.width, erases, points: [placeOf(event, canvas)] };
  addShape(stroke);
}

export function extendStroke(event) {
  if (!stroke) return;
  for (const moved of event.getCoalescedEvents?.() ?? [event]) stroke.points.push(placeOf(moved, event.currentTarget));
  update();
}

export function endStroke() {
  stroke = null;
}

function placeOf(event, canvas) {
  const box = canvas.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * state.source.width;
  const y = ((event.clientY - box.top) / box.height) * state.source.height;
  return [x, y];
}
