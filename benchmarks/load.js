// Sends some requests to a server and prints what came back: `node load.js < spec.json`.
// autocannon does the sending (npm install autocannon); every connection has an order of masks of its own. At a given
// rate, requests are sent from here: autocannon would send those of a second all at once, and count them as if one came
// every millisecond. They come at random times, whether or not others were answered, and wait from when they were due.
const autocannon = require('autocannon')
const http = require('http')

const spec = JSON.parse(require('fs').readFileSync(0))
const bodies = spec.images.map((image) => (model) =>
  JSON.stringify({ model, input: image, encoding_format: 'base64' }))

function tell (found) {
  const used = process.cpuUsage()
  console.log(JSON.stringify({ ...found, cpu: (used.user + used.system) / 1e6 }))
}

function atRate () {
  const agent = new http.Agent({ keepAlive: true })
  const found = { requests: 0, refused: 0, errors: 0 }
  const waited = []
  const first = performance.now()
  let seed = 1
  const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647
  let due = first
  let left = spec.amount
  const ended = (start) => {
    waited.push(performance.now() - start)
    if (--left > 0) return
    waited.sort((a, b) => a - b)
    const at = (share) => waited[Math.min(waited.length - 1, Math.floor(share * waited.length))]
    agent.destroy()
    tell({ ...found, seconds: (performance.now() - first) / 1000, p50: at(0.5), p99: at(0.99) })
  }
  for (let i = 0; i < spec.amount; i++) {
    due += -Math.log(random()) * 1000 / spec.rate
    const start = due
    const order = spec.orders[i % spec.orders.length]
    const body = bodies[i % bodies.length](order[Math.floor(i / spec.orders.length) % order.length])
    setTimeout(() => {
      const headers = { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body) }
      const request = http.request(spec.url + spec.path, { agent, method: 'POST', headers }, (answer) => {
        answer.resume()
        answer.on('end', () => {
          found[answer.statusCode < 300 ? 'requests' : 'refused']++
          ended(start)
        })
      })
      request.on('error', () => { found.errors++; ended(start) })
      request.end(body)
    }, start - first)
  }
}

function asFastAsItCan () {
  let number = 0
  let first, last // autocannon itself looks at the clock once a second
  const instance = autocannon({
    url: spec.url,
    connections: spec.connections,
    amount: spec.amount,
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
    tell({
      requests: result['2xx'], refused: result.non2xx, errors: result.errors, seconds: (last - first) / 1000,
      p50: result.latency.p50, p99: result.latency.p99
    })
  })
  instance.on('start', () => { first = performance.now() })
  instance.on('response', () => { last = performance.now() })
}

if (spec.rate) atRate()
else asFastAsItCan()
