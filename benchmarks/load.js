// Sends some requests to a server and prints what came back: `node load.js < spec.json`.
// autocannon does the sending (npm install autocannon); every connection has an order of masks of its own.
const autocannon = require('autocannon')

const spec = JSON.parse(require('fs').readFileSync(0))
const bodies = spec.images.map((image) => (model) =>
  JSON.stringify({ model, input: image, encoding_format: 'base64' }))
let number = 0
let first, last // autocannon itself looks at the clock once a second

const instance = autocannon({
  url: spec.url,
  connections: spec.connections,
  amount: spec.amount,
  ...(spec.rate ? { overallRate: spec.rate } : {}),
  timeout: 60,
  method: 'POST',
  headers: { 'content-type': 'application/json' },
  setupClient: (client) => {
    const order = spec.orders[number++ % spec.orders.length]
    client.setRequests(order.map((model, i) => ({
      method: 'POST', path: spec.path, body: bodies[i % bodies.length](model),
      headers: { 'content-type': 'application/json' }
    })))
  }
}, (error, result) => {
  if (error) throw error
  const used = process.cpuUsage()
  console.log(JSON.stringify({
    requests: result['2xx'], refused: result.non2xx, errors: result.errors, seconds: (last - first) / 1000,
    p50: result.latency.p50, p99: result.latency.p99, cpu: (used.user + used.system) / 1e6
  }))
})
instance.on('start', () => { first = performance.now() })
instance.on('response', () => { last = performance.now() })
