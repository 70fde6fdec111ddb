//! What cannot be run here, and what its own makers publish of it.
//!
//! Guarantee: every figure is somebody else's, of their engines and their load, and stands beside
//! its source; none is compared with ours. Not here: what was measured.

/// A router that needs more than a process to run.
pub(super) struct Published {
    /// Its name.
    pub name: &'static str,
    /// Why it is not measured.
    pub why: &'static str,
    /// What is said of it, with whose engines.
    pub figures: &'static str,
    /// Where.
    pub source: &'static str,
}

/// Those of them that are asked for most.
pub(super) const ALL: [Published; 3] = [
    Published {
        name: "llm-d and the Gateway API Inference Extension's endpoint picker",
        why: "needs Kubernetes, its gateway API and pods that it watches",
        figures: "8 vLLM pods on 16 H100, Qwen-32B, 150 shared contexts of 6,000 tokens, 3 to 60 \
            requests/s: output tokens/s 4,429 (random), 6,944 (approximate prefix scorer), 8,730 \
            (precise, from the engines' KV events); mean TTFT 45.3, 13.3 and 0.30 s",
        source: "llm-d.ai/blog/kvcache-wins-you-can-see",
    },
    Published {
        name: "AIBrix",
        why: "needs Kubernetes, its controllers and an Envoy Gateway",
        figures: "prefix-cache routing against random: about 45 % better TTFT, averaged over \
            patterns of requests",
        source: "aibrix.github.io/posts/2025-05-21-v0.3.0-release",
    },
    Published {
        name: "KubeAI",
        why: "needs Kubernetes, whose pods it starts and finds",
        figures: "8 vLLM on an L4 each, Llama 3.1 8B, ShareGPT made to share prefixes, 8,000 \
            requests at once, prefix hash against a Kubernetes service: mean TTFT 39.2 to 0.24 s, \
            tokens/s +41 %",
        source: "kubeai.org/benchmarks/prefix-aware-load-balancing",
    },
];
