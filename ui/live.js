// Sliders over simulations that were done before: nothing is asked of the server while they move.
// data: traffic, steps, loosened (factors), sizes [{text, usd_per_h, kept[t][s][l][limit], holds[t][s][l]}],
// plan (index), rate_rps, limits (texts), wanted (shares), is_dark; see planner/studies/sliders.py.
const KNOBS = ["traffic", "steps", "loosened"]
const LEFT = 52, RIGHT = 12, TOP = 12, BOTTOM = 40, HEIGHT = 230, LEAST_WIDTH = 390, MOST_WIDTH = 700
// Width of a picture in units of its viewBox: as many as it has pixels on the screen (`measured`), so that letters
// keep their size.
let WIDTH = 460
const HUES = [["#0072b2", "#56b4e9"], ["#d55e00", "#f0883e"], ["#009e73", "#3fc79a"], ["#a0569b", "#e08fd0"]]

const figure = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits })
const usd = value => value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })
const percent = share => `${figure(100 * share, 1)}\u00a0%`

function draw(svg, parts) {
  svg.replaceChildren(...parts.map(([name, attributes, text]) => {
    const part = document.createElementNS("http://www.w3.org/2000/svg", name)
    for (const [key, value] of Object.entries(attributes)) part.setAttribute(key, value)
    if (text !== undefined) part.textContent = text
    return part
  }))
}

function axes(rates, ticks, x, y, unit) {
  const base = HEIGHT - BOTTOM
  const parts = ticks.flatMap(value => [
    ["line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }],
    ["text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, unit(value)],
  ])
  for (let rate = rates[0], k = 0; k <= 4; k += 1) {
    const at = rate + (rates[rates.length - 1] - rate) * k / 4
    parts.push(["text", { x: x(at), y: base + 16, "text-anchor": "middle" }, figure(at, 1)])
  }
  parts.push(["text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "requests/s"])
  return parts
}

export default function ({ data, parentElement }) {
  const root = parentElement.querySelector(".live")
  root.classList.toggle("dark", Boolean(data.is_dark))
  const at = {}  // index of each knob's position in its list of factors
  const plan = data.sizes[data.plan]
  const rates = data.traffic.map(factor => factor * data.rate_rps)
  const span = rates[rates.length - 1] - rates[0]
  const x = rate => LEFT + (rate - rates[0]) / span * (WIDTH - LEFT - RIGHT)
  const knob = name => root.querySelector(`[data-knob=${name}]`)
  const hue = k => HUES[k % HUES.length][data.is_dark ? 1 : 0]
  // The sizes are sorted by cost, so the first one that holds is the cheapest.
  const cheapest = (t, s, l) => data.sizes.find(size => size.holds[t][s][l])

  function cost() {
    const found = rates.map((_, t) => cheapest(t, at.steps, at.loosened))
    const most = Math.max(plan.usd_per_h, ...data.sizes.map(size => size.usd_per_h)) * 1.1
    const y = value => HEIGHT - BOTTOM - value / most * (HEIGHT - BOTTOM - TOP)
    const parts = axes(rates, [0, most / 2.2, most / 1.1], x, y, value => figure(value, most < 10 ? 1 : 0))
    let path = ""
    found.forEach((size, t) => {
      if (!size) return
      const from = t && found[t - 1] ? x(rates[t - 1]) : x(rates[t])
      path += `${t && found[t - 1] ? "L" : "M"}${from},${y(size.usd_per_h)}L${x(rates[t])},${y(size.usd_per_h)}`
    })
    parts.push(["text", { x: LEFT - 46, y: 11 }, "USD/h"])
    parts.push(["line", { class: "wanted", stroke: hue(1), x1: LEFT, x2: WIDTH - RIGHT, y1: y(plan.usd_per_h), y2: y(plan.usd_per_h) }])
    parts.push(["path", { class: "line", stroke: hue(0), d: path || "M0,0" }])
    parts.push(["line", { class: "here", x1: x(rates[at.traffic]), x2: x(rates[at.traffic]), y1: TOP, y2: HEIGHT - BOTTOM }])
    const here = found[at.traffic]
    if (here) parts.push(["circle", { class: "marker", cx: x(rates[at.traffic]), cy: y(here.usd_per_h), r: 6, fill: hue(0) }])
    draw(root.querySelector(".cost"), parts)
    root.querySelector(".cost").setAttribute("aria-label", here
      ? `At ${figure(rates[at.traffic], 1)} requests/s: ${usd(here.usd_per_h)} USD/h`
      : `At ${figure(rates[at.traffic], 1)} requests/s: none of these fleets keeps the promise`)
  }

  function kept() {
    const y = share => HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
    const parts = axes(rates, [0, 0.5, 1], x, y, percent)
    data.limits.forEach((name, k) => {
      const shares = rates.map((_, t) => plan.kept[t][at.steps][at.loosened][k])
      const path = shares.map((share, t) => share < 0 ? "" : `${x(rates[t])},${y(share)}`).filter(Boolean)
      parts.push(["line", { class: "wanted", stroke: hue(k), x1: LEFT, x2: WIDTH - RIGHT, y1: y(data.wanted[k]), y2: y(data.wanted[k]) }])
      parts.push(["path", { class: "line", stroke: hue(k), d: path.length ? `M${path.join("L")}` : "M0,0" }])
      const share = shares[at.traffic]
      if (share >= 0) parts.push(["circle", { class: "marker", cx: x(rates[at.traffic]), cy: y(share), r: 5, fill: hue(k) }])
    })
    parts.push(["line", { class: "here", x1: x(rates[at.traffic]), x2: x(rates[at.traffic]), y1: TOP, y2: HEIGHT - BOTTOM }])
    draw(root.querySelector(".kept"), parts)
    root.querySelector(".kept").setAttribute("aria-label", data.limits.map((name, k) => {
      const share = plan.kept[at.traffic][at.steps][at.loosened][k]
      return share < 0 ? `${name}: not simulated` : `${name}: ${percent(share)}`
    }).join("; "))
  }

  function legend() {
    root.querySelector(".legend").replaceChildren(...data.limits.map((name, k) => {
      const entry = document.createElement("span"), mark = document.createElement("i")
      mark.style.background = hue(k)
      entry.append(mark, name)
      return entry
    }))
  }

  function say() {
    const [t, s, l] = [at.traffic, at.steps, at.loosened]
    const shares = plan.kept[t][s][l]
    const missed = data.limits.filter((_, k) => shares[k] < data.wanted[k])
    const others = cheapest(t, s, l)
    const holds = plan.holds[t][s][l]
    const verdict = document.createElement("strong")
    verdict.textContent = holds ? "The plan keeps its SLO on paper." : shares.some(share => share < 0)
      ? "There was no time to simulate this." : "The plan misses its SLO"
    verdict.className = holds ? "yes" : "no"
    let more = ""
    if (!holds && shares.every(share => share >= 0)) {
      more = missed.length
        ? `: ${missed.map(name => `${name} for ${percent(shares[data.limits.indexOf(name)])} of what it counts, ${percent(data.wanted[data.limits.indexOf(name)])} promised`).join("; ")}.`
        : ": its queue grows, or too few requests keep all limits at once."
    }
    let other = ""
    if (!holds && others) other = ` On paper it is kept by ${others.text}: ${usd(others.usd_per_h)} USD/h, ${usd(others.usd_per_h - plan.usd_per_h)} more.`
    else if (!holds) other = " None of these fleets keeps it; plan anew."
    else if (others && others.usd_per_h < plan.usd_per_h) other = ` So does ${others.text}: ${usd(others.usd_per_h)} USD/h.`
    root.querySelector(".said").replaceChildren(verdict, more + other)
  }

  function show() {
    for (const name of KNOBS) {
      const value = data[name][at[name]]
      const rate = name === "traffic" ? `, ${figure(rates[at.traffic], 1)} requests/s` : ""
      const text = `× ${figure(value, 2)}${rate}`
      root.querySelector(`[data-of=${name}]`).textContent = text
      knob(name).value = at[name]
      knob(name).setAttribute("aria-valuetext", text)
    }
    cost()
    kept()
    say()
  }

  // drawn anew where the page becomes wider or narrower
  const measured = () => {
    const shown = Math.round(root.querySelector(".cost").clientWidth) || WIDTH
    WIDTH = Math.min(Math.max(shown, LEAST_WIDTH), MOST_WIDTH)
    for (const svg of root.querySelectorAll("svg")) svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`)
  }
  const watch = new ResizeObserver(() => {
    const before = WIDTH
    measured()
    if (WIDTH !== before) show()
  })

  const reset = () => {
    for (const name of KNOBS) at[name] = data[name].indexOf(1)
    show()
  }
  for (const name of KNOBS) {
    const input = knob(name)
    input.max = data[name].length - 1
    input.oninput = () => {
      at[name] = Number(input.value)
      show()
    }
  }
  root.querySelector(".reset").onclick = reset
  measured()
  legend()
  reset()
  watch.observe(root)
  return () => watch.disconnect()
}
