// Perfetto's trace processor in Node: both streams are messages TraceProcessorRpcStream.
// usage: node trace_processor.js FOLDER < REQUESTS > REPLIES
// FOLDER has Perfetto's page, which runs the trace processor in the worker `engine_bundle.js`.

const fs = require('fs');

const requests = new Uint8Array(fs.readFileSync(0));
process.chdir(process.argv[2]); // the worker reads trace_processor.wasm from there
console.log = console.warn = console.error; // standard output has replies only

const worker = {};
const port = {postMessage: (reply) => fs.writeSync(1, reply)};
const load = new Function('self', 'require', '__dirname', fs.readFileSync('engine_bundle.js', 'utf8'));
load(worker, require, process.cwd());
worker.onmessage({data: {enginePort: port}});
process.once('beforeExit', () => port.onmessage({data: requests})); // once the program is compiled, nothing else is to be done
