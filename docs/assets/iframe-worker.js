// Browsers start no worker from a file on disk. There the search runs in a hidden frame instead: the same messages go
// to and fro, only not in parallel.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = (this.inside = frame.contentWindow)
      const load = (address) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script")
          script.src = address
          script.onload = done
          script.onerror = failed
          inside.document.body.appendChild(script)
        })
      inside.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve())
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      }
      this.ready = load(url)
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
