// Search on pages that are opened from a folder: browsers refuse workers there, so the worker's script runs in a hidden frame.
// The theme looks for the name IFrameWorker, and needs postMessage, message events and importScripts alone.
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    document.body.append(frame)
    const page = frame.contentDocument
    page.open()
    page.write(
      `<body><script>postMessage = data => parent.postMessage(data, "*"); importScripts = ${importScripts}</script>` +
        `<script src="${url}"></script>`
    )
    page.close()
    this.scope = frame.contentWindow
    this.loaded = new Promise(resolve => (this.scope.onload = resolve))
    addEventListener("message", event => {
      if (event.source !== this.scope) return
      const copy = new MessageEvent("message", { data: event.data })
      this.dispatchEvent(copy)
      this.onmessage?.(copy)
    })
  }

  postMessage(data) {
    this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
  }
}

async function importScripts(...urls) {
  for (const url of urls) {
    const script = document.createElement("script")
    script.src = url
    document.body.append(script)
    await new Promise(resolve => (script.onload = resolve))
  }
}

if (location.protocol === "file:") window.Worker = IFrameWorker
