// Holds a connection as a well-behaved backend does that has nothing to ask: it pings, at rest and beside a quiet stream.
//
// usage: node idle.js HOST:PORT JOB_ID KEEPALIVE_MS IDLE_MS
// Writes one line of JSON: {"states": of the channel, in their order, "watch": how the stream ended if it did, "code": of
// a call at the end}.
"use strict";

const grpc = require("@grpc/grpc-js");

const STATES = Object.fromEntries(Object.entries(grpc.connectivityState).map(([name, state]) => [state, name]));
const CODES = Object.fromEntries(Object.entries(grpc.status).map(([name, code]) => [code, name]));
const SERVICE = "/bottega.v1.ImageService";
const same = (bytes) => bytes;

async function main(address, jobId, keepaliveMs, idleMs) {
  const client = new grpc.Client(address, grpc.credentials.createInsecure(), {
    "grpc.keepalive_time_ms": keepaliveMs,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 1,
  });
  const id = Buffer.from(jobId);
  const request = Buffer.concat([Buffer.from([0x0a, id.length]), id]);
  const call = () =>
    new Promise((resolve) =>
      client.makeUnaryRequest(`${SERVICE}/GetJob`, same, same, request, (error) => resolve(CODES[error ? error.code : 0])),
    );
  await call();
  const channel = client.getChannel();
  const states = [STATES[channel.getConnectivityState(false)]];
  const follow = () =>
    channel.watchConnectivityState(channel.getConnectivityState(false), Infinity, () => {
      states.push(STATES[channel.getConnectivityState(false)]);
      follow();
    });
  follow();
  await new Promise((resolve) => setTimeout(resolve, idleMs));
  let watch = null;
  const stream = client.makeServerStreamRequest(`${SERVICE}/WatchJob`, same, same, request);
  stream.on("data", () => {});
  stream.on("error", (error) => (watch = `${CODES[error.code]}: ${error.details}`));
  stream.on("end", () => (watch ??= "OK"));
  await new Promise((resolve) => setTimeout(resolve, idleMs));
  const code = await call();
  console.log(JSON.stringify({ states, watch, code }));
}

main(process.argv[2], process.argv[3], Number(process.argv[4]), Number(process.argv[5])).then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
