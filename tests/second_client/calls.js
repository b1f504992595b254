// Makes calls as a backend in another language does: learns the contract from the server's reflection alone.
//
// usage: node calls.js HOST:PORT < CALLS
// CALLS: lines of JSON {"call": "package.Service/Method", "data": request, "timeout_s": seconds}.
// Writes one line of JSON for each, in their order: {"call", "code", "details", "answers"}, then one with the services.
"use strict";

const readline = require("node:readline");
const grpc = require("@grpc/grpc-js");
const { GrpcReflection } = require("grpc-js-reflection-client");

const NAMES = Object.fromEntries(Object.entries(grpc.status).map(([name, code]) => [code, name]));
// Names of fields as in the .proto; a oneof says which of its fields is there; bytes travel as base64.
const FORM = { keepCase: true, longs: String, enums: String, bytes: String, defaults: false, oneofs: true };
const REFLECTION_TIMEOUT_MS = 10_000;

async function main(address) {
  const credentials = grpc.credentials.createInsecure();
  const reflection = new GrpcReflection(address, credentials);
  const deadline = () => ({ deadline: Date.now() + REFLECTION_TIMEOUT_MS });
  const clients = new Map();
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { call, data, timeout_s } = JSON.parse(line);
    const [service, method] = call.split("/");
    if (!clients.has(service)) {
      const contract = (await reflection.getDescriptorBySymbol(service, deadline())).getPackageObject(FORM);
      const Service = service.split(".").reduce((scope, name) => scope[name], contract);
      clients.set(service, new Service(address, credentials));
    }
    const ended = await made(clients.get(service), method, data, { deadline: Date.now() + timeout_s * 1000 });
    console.log(JSON.stringify({ call, ...ended }));
  }
  console.log(JSON.stringify({ services: await reflection.listServices("*", deadline()) }));
  for (const client of clients.values()) client.close();
}

function made(client, method, data, options) {
  if (typeof client[method] !== "function") throw new Error(`reflection knows no method ${method}`);
  return new Promise((resolve) => {
    const answers = [];
    const end = (status) =>
      resolve({ code: NAMES[status ? status.code : 0], details: status ? status.details : "", answers });
    if (client[method].responseStream) {
      const stream = client[method](data, options);
      stream.on("data", (answer) => answers.push(answer));
      stream.on("error", end);
      stream.on("end", () => end(null));
    } else {
      client[method](data, options, (error, answer) => {
        if (!error) answers.push(answer);
        end(error);
      });
    }
  });
}

main(process.argv[2]).then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
