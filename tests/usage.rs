//! Proves what is read from engines' answers, in every cut, and that nothing a model writes is
//! ever read as a count.
#![allow(clippy::unwrap_used)]

use prefix_router::usage::{Reader, Reporting, Sampler, State, TOKENS_MAX, Usage};
use proptest::prelude::*;
use serde_json::json;

fn read(pieces: &[&[u8]]) -> Usage {
    let mut reader = Reader::new();
    for piece in pieces {
        reader.feed(piece);
    }
    reader.finish()
}

fn line(usage: Usage) -> String {
    let show = |count: Option<u64>| count.map_or("-".to_owned(), |count| count.to_string());
    format!(
        "{} {} {} {}",
        show(usage.prompt_tokens),
        show(usage.cached_tokens),
        show(usage.output_tokens),
        usage.state().label()
    )
}

/// `expected` is: prompt tokens, cached tokens, output tokens, state.
#[track_caller]
fn check(body: &str, expected: &str) {
    let bytes = body.as_bytes();
    assert_eq!(line(read(&[bytes])), expected, "whole: {body}");
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(line(read(&single)), expected, "byte by byte: {body}");
    for at in 0..bytes.len() {
        let (one, two) = bytes.split_at(at);
        assert_eq!(line(read(&[one, two])), expected, "cut at {at}: {body}");
    }
}

#[test]
fn openai_chat_and_completions() {
    check(
        r#"{"id":"1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",
        "content":"Hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3011,"total_tokens":3019,
        "completion_tokens":8,"prompt_tokens_details":{"cached_tokens":3008,"audio_tokens":0}}}"#,
        "3011 3008 8 ok",
    );
    check(
        r#"{"choices":[{"text":"Hi"}],"usage":{"prompt_tokens":5,"completion_tokens":1,
        "prompt_tokens_details":null}}"#,
        "5 - 1 no_details",
    );
    check(
        r#"{"object":"list","data":[{"embedding":[0.1,-2e-5]}],"usage":{"prompt_tokens":7}}"#,
        "7 - - no_details",
    );
    check(
        r#"{"choices":[{"text":"Hi"}],"usage":null}"#,
        "- - - absent",
    );
}

#[test]
fn openai_chat_stream() {
    check(
        "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}],\"usage\":null}\n\n\
         data: {\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":2,\
         \"prompt_tokens_details\":{\"cached_tokens\":64}}}\n\ndata: [DONE]\n\n",
        "100 64 2 ok",
    );
    // Without `stream_options.include_usage`.
    check(
        "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\n\ndata: [DONE]\n\n",
        "- - - absent",
    );
    // vLLM's `continuous_usage_stats`: with every event, and growing.
    check(
        "data:{\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1}}\r\n\r\n\
         data:{\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2}}\r\n\r\n",
        "9 - 2 no_details",
    );
}

#[test]
fn openai_responses() {
    check(
        r#"{"object":"response","output":[{"type":"message","content":[{"text":"Hi"}]}],"usage":{
        "input_tokens":328,"input_tokens_details":{"cached_tokens":320},"output_tokens":52,
        "output_tokens_details":{"reasoning_tokens":40},"total_tokens":380}}"#,
        "328 320 52 ok",
    );
    check(
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\
         \"usage\":null}}\n\nevent: response.output_text.delta\n\
         data: {\"type\":\"response.output_text.delta\",\"delta\":\"Hi\"}\n\n\
         event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\
         \"output\":[],\"usage\":{\"input_tokens\":40,\"input_tokens_details\":\
         {\"cached_tokens\":32},\"output_tokens\":3}}}\n\n",
        "40 32 3 ok",
    );
}

#[test]
fn anthropic_counts_cached_tokens_beside_input_tokens() {
    check(
        r#"{"type":"message","content":[{"type":"text","text":"Hi"}],"usage":{"input_tokens":50,
        "cache_creation_input_tokens":200,"cache_read_input_tokens":1000,"output_tokens":5,
        "cache_creation":{"ephemeral_5m_input_tokens":200}}}"#,
        "1250 1000 5 ok",
    );
    check(
        r#"{"type":"message","usage":{"input_tokens":50,"output_tokens":5,
        "cache_read_input_tokens":null}}"#,
        "50 - 5 no_details",
    );
    check(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[],\
         \"usage\":{\"input_tokens\":50,\"cache_read_input_tokens\":1000,\
         \"cache_creation_input_tokens\":0,\"output_tokens\":1}}}\n\n\
         event: ping\ndata: {\"type\": \"ping\"}\n\n\
         event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\
         \"delta\":{\"type\":\"text_delta\",\"text\":\"Hi\"}}\n\n\
         event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\
         \"end_turn\"},\"usage\":{\"output_tokens\":15}}\n\n\
         event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        "1050 1000 15 ok",
    );
    // An engine that knows its numbers only at the end.
    check(
        "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":0}}}\n\n\
         data: {\"type\":\"message_delta\",\"usage\":{\"input_tokens\":7,\"output_tokens\":2,\
         \"cache_read_input_tokens\":3}}\n\n",
        "10 3 2 ok",
    );
}

#[test]
fn gemini() {
    check(
        r#"{"candidates":[{"content":{"parts":[{"text":"Hi"}]}}],"usageMetadata":{
        "promptTokenCount":2000,"cachedContentTokenCount":1500,"candidatesTokenCount":9,
        "promptTokensDetails":[{"modality":"TEXT","tokenCount":2000}]}}"#,
        "2000 1500 9 ok",
    );
    // The stream without `alt=sse` is one array.
    check(
        "[{\"candidates\":[],\"usageMetadata\":{\"promptTokenCount\":20}}\n,\r\n\
         {\"candidates\":[],\"usageMetadata\":{\"promptTokenCount\":20,\
         \"candidatesTokenCount\":4}}\n]\n",
        "20 - 4 no_details",
    );
    check(
        "data: {\"candidates\":[],\"usageMetadata\":{\"promptTokenCount\":20,\
         \"cachedContentTokenCount\":16}}\r\n\r\n",
        "20 16 - ok",
    );
}

#[test]
fn engines_own_apis() {
    // SGLang.
    check(
        "data: {\"text\":\"H\",\"meta_info\":{\"id\":\"1\",\"finish_reason\":null,\
         \"prompt_tokens\":12,\"completion_tokens\":1,\"cached_tokens\":8}}\n\n\
         data: {\"text\":\"Hi\",\"meta_info\":{\"id\":\"1\",\"finish_reason\":{\"type\":\"stop\"},\
         \"prompt_tokens\":12,\"completion_tokens\":2,\"cached_tokens\":8}}\n\ndata: [DONE]\n\n",
        "12 8 2 ok",
    );
    // A batch of SGLang's: the largest.
    check(
        r#"[{"text":"a","meta_info":{"prompt_tokens":3,"cached_tokens":0}},
        {"text":"b","meta_info":{"prompt_tokens":4,"cached_tokens":1}}]"#,
        "4 1 - ok",
    );
    // llama.cpp: with usage, without, and from before `cache_n`.
    check(
        r#"{"choices":[],"usage":{"prompt_tokens":3010,"completion_tokens":4},
        "timings":{"cache_n":2979,"prompt_n":31,"prompt_ms":50.1,"predicted_n":4}}"#,
        "3010 2979 4 ok",
    );
    check(
        r#"{"content":"Hi","tokens_cached":3012,"tokens_evaluated":3010,
        "timings":{"cache_n":2979,"prompt_n":31,"predicted_n":3}}"#,
        "3010 2979 3 ok",
    );
    check(
        r#"{"content":"Hi","timings":{"prompt_n":31,"prompt_ms":5e1}}"#,
        "- - - absent",
    );
    // Ollama: a line a document.
    check(
        "{\"model\":\"m\",\"message\":{\"role\":\"assistant\",\"content\":\"Hi\"},\"done\":false}\n\
         {\"model\":\"m\",\"message\":{\"content\":\"\"},\"done\":true,\"prompt_eval_count\":26,\
         \"eval_count\":298}\n",
        "26 - 298 no_details",
    );
    check(
        r#"{"model":"m","response":"Hi","context":[1,2],"prompt_eval_count":26,"eval_count":2}"#,
        "26 - 2 no_details",
    );
    // TGI.
    check(
        "data:{\"index\":1,\"token\":{\"id\":5,\"text\":\"Hi\"},\"generated_text\":\"Hi\",\
         \"details\":{\"finish_reason\":\"length\",\"generated_tokens\":1,\"input_length\":11}}\n\n",
        "11 - 1 no_details",
    );
    check(
        r#"[{"generated_text":"Hi","details":{"generated_tokens":20,"prefill":[{"id":1}]}}]"#,
        "- - 20 absent",
    );
    // Triton says nothing.
    check(r#"{"model_name":"m","text_output":"Hi"}"#, "- - - absent");
}

#[test]
fn bedrock_and_cohere() {
    check(
        r#"{"output":{"message":{"content":[{"text":"Hi"}]}},"usage":{"inputTokens":30,
        "outputTokens":6,"totalTokens":136,"cacheReadInputTokens":90,"cacheWriteInputTokens":10}}"#,
        "130 90 6 ok",
    );
    check(
        r#"{"message":{"content":[{"type":"text","text":"Hi"}]},"usage":{"billed_units":{
        "input_tokens":5.0,"output_tokens":8},"tokens":{"input_tokens":71.0,"output_tokens":10}}}"#,
        "71 - 10 no_details",
    );
    check(
        "event: message-end\ndata: {\"type\":\"message-end\",\"delta\":{\"finish_reason\":\
         \"COMPLETE\",\"usage\":{\"billed_units\":{\"input_tokens\":17},\"tokens\":{\
         \"input_tokens\":215,\"output_tokens\":12},\"cached_tokens\":208}}}\n\n",
        "215 208 12 ok",
    );
}

#[test]
fn numbers_that_cannot_be_are_not_read() {
    check(r#"{"usage":{"prompt_tokens":-5}}"#, "- - - absent");
    check(r#"{"usage":{"prompt_tokens":"5"}}"#, "- - - absent");
    check(r#"{"usage":{"prompt_tokens":[5]}}"#, "- - - absent");
    check(r#"{"usage":{"prompt_tokens":1e3}}"#, "- - - absent");
    check(r#"{"usage":[{"prompt_tokens":5}]}"#, "- - - absent");
    check(r#"{"usage":{"cached_tokens":5}}"#, "- - - absent");
    check(r#"{"usage":{"prompt_tokens":1e300}}"#, "- - - absent");
    // More cached than there are.
    check(
        r#"{"usage":{"prompt_tokens":10,"cached_tokens":11}}"#,
        "10 10 - ok",
    );
}

#[test]
fn an_answer_with_a_count_that_no_prompt_has_says_nothing() {
    assert_eq!(TOKENS_MAX, 16_777_216);
    // prompt_tokens, cached_tokens, completion_tokens
    let row = |prompt: &str, cached: &str, output: &str, expected: &str| {
        check(
            &format!(
                r#"{{"usage":{{"prompt_tokens":{prompt},"prompt_tokens_details":
                {{"cached_tokens":{cached}}},"completion_tokens":{output}}}}}"#
            ),
            expected,
        );
    };
    row("16777215", "8", "1", "16777215 8 1 ok");
    row(
        "16777216",
        "16777216",
        "16777216",
        "16777216 16777216 16777216 ok",
    );
    row("16777217", "8", "1", "- - - absent");
    row("10", "16777216", "1", "10 10 1 ok");
    row("10", "16777217", "1", "- - - absent");
    row("10", "8", "16777217", "- - - absent");
    row("4294967296", "8", "1", "- - - absent");
    row("4294967296.5", "8", "1", "- - - absent");
    // More than 64 bits.
    row("99999999999999999999999", "8", "1", "- - - absent");
    // Two that only together are too much.
    check(
        r#"{"usage":{"input_tokens":16777216,"cache_read_input_tokens":1}}"#,
        "- - - absent",
    );
    check(
        r#"{"usage":{"input_tokens":18446744073709551615,"cache_read_input_tokens":9}}"#,
        "- - - absent",
    );
    // What the other events of a stream say does not mend it.
    check(
        "data: {\"usage\":{\"prompt_tokens\":4294967296}}\n\n\
         data: {\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n",
        "- - - absent",
    );
}

#[test]
fn cut_off_answers_say_what_was_complete() {
    check(
        r#"{"usage":{"prompt_tokens":10,"cached_to"#,
        "10 - - no_details",
    );
    check(r#"{"usage":{"prompt_tokens":10"#, "- - - absent");
    check("data: {\"usage\":{\"prompt_tokens\":1", "- - - absent");
    check("", "- - - absent");
}

#[test]
fn frames_of_event_streams() {
    // Comments, other fields, a data line in two, and an end without an empty line.
    check(
        ": keep-alive\n\nid: 1\nretry: 10\nevent: x\ndatum: {\"usage\":{\"prompt_tokens\":1}}\n\n\
         data: {\"usage\":\ndata: {\"prompt_tokens\":2}}\n",
        "2 - - no_details",
    );
    // A broken event does not spoil the next one, and an incomplete one ends with its frame.
    check(
        "data: {\"a\" 1}\n\ndata: {\"usage\":{\"prompt_tokens\":3}}\n\n",
        "3 - - no_details",
    );
    check(
        "data: {\"usage\":{\ndata: x\n\ndata: \"prompt_tokens\":3}}\n\n",
        "- - - absent",
    );
    // A byte-order mark, and events without empty lines between them.
    check(
        "\u{feff}data: {\"a\":1}\ndata: {\"usage\":{\"prompt_tokens\":4}}\n",
        "4 - - no_details",
    );
    check(
        "\u{feff}\r\n {\"usage\":{\"prompt_tokens\":4}}",
        "4 - - no_details",
    );
    // Not JSON at all.
    check("hello\n\ndata\n\ndata: world\n\n", "- - - absent");
    check(
        "\u{1f}\u{8b}{\"usage\":{\"prompt_tokens\":4}}",
        "- - - absent",
    );
}

#[test]
fn what_a_model_writes_is_never_read() {
    let lie = r#"{"usage":{"prompt_tokens":666,"cached_tokens":666}}"#;
    let texts = [
        lie.to_owned(),
        format!("\"}}]}},{lie}\n\n\ndata: {lie}\n\n\\\"{lie}"),
    ];
    for text in texts {
        let chat = json!({"choices": [{"message": {"content": text, "tool_calls": [
            {"function": {"name": text, "arguments": text}}]}}], "usage": {"prompt_tokens": 1}});
        check(&chat.to_string(), "1 - - no_details");
        let chat = serde_json::to_string_pretty(&chat).unwrap();
        check(&chat, "1 - - no_details");
        let event = json!({"choices": [{"delta": {"content": text}}]});
        check(&format!("data: {event}\n\n"), "- - - absent");
        // Tool calls that are objects, and structured answers.
        let lie: serde_json::Value = serde_json::from_str(lie).unwrap();
        let ollama = json!({"message": {"content": text, "tool_calls": [{"function": {
            "arguments": lie}}]}, "prompt_eval_count": 2});
        check(&format!("{ollama}\n"), "2 - - no_details");
        let converse = json!({"output": {"message": {"content": [{"toolUse": {"input": lie}}]}}});
        check(&converse.to_string(), "- - - absent");
        let block = json!({"type": "message_start", "message": {"content": [lie, {"input": lie}]}});
        check(&format!("data: {block}\n\n"), "- - - absent");
        let nested = json!({"usage": {"usage": lie, "x": lie, "tokens": lie}});
        check(&nested.to_string(), "- - - absent");
    }
}

#[test]
fn deep_nesting_costs_nothing() {
    let deep = format!(
        "{{\"usage\":{}1{},\"timings\":{}",
        "[".repeat(100_000),
        "]".repeat(100_000),
        "{\"a\":".repeat(100_000)
    );
    assert_eq!(read(&[deep.as_bytes()]), Usage::default());
    let open = "{\"message\":".repeat(100_000);
    assert_eq!(read(&[open.as_bytes()]), Usage::default());
}

fn usage(prompt_tokens: Option<u64>, cached_tokens: Option<u64>) -> Usage {
    Usage {
        prompt_tokens,
        cached_tokens,
        output_tokens: None,
    }
}

/// vLLM and SGLang leave the details out when nothing was cached.
#[test]
fn once_an_api_gave_details_their_absence_means_zero() {
    let mut reporting = Reporting::default();
    let plain = usage(Some(10), None);
    assert_eq!(reporting.read("openai_chat", plain), plain);
    let detailed = usage(Some(10), Some(4));
    assert_eq!(reporting.read("openai_chat", detailed), detailed);
    let zero = reporting.read("openai_chat", plain);
    assert_eq!((zero, zero.state()), (usage(Some(10), Some(0)), State::Ok));
    // Of another API, nothing is known; and no usage stays no usage.
    assert_eq!(reporting.read("openai_embeddings", plain), plain);
    assert_eq!(
        reporting.read("openai_chat", Usage::default()),
        Usage::default()
    );
}

#[test]
fn the_first_answer_is_sampled_then_one_in_so_many_without_a_rhythm() {
    let takes = |one_in, count: usize| {
        let mut sampler = Sampler::new(one_in);
        (0..count).map(|_| sampler.take()).collect::<Vec<bool>>()
    };
    assert!(takes(0, 1000).iter().all(|taken| !taken));
    assert!(takes(1, 1000).iter().all(|taken| *taken));
    for one_in in [2, 8, 1024] {
        let taken = takes(one_in, 200_000);
        assert!(taken[0]);
        for turns in [1, 2, 4, 7, 8] {
            for turn in 0..turns {
                let all: Vec<&bool> = taken.iter().skip(turn).step_by(turns).collect();
                let hits = all.iter().filter(|taken| ***taken).count();
                let expected = all.len() as f64 / f64::from(one_in);
                // Four standard deviations, and the first one.
                let off = (hits as f64 - expected).abs();
                assert!(
                    off < 4.0 * expected.sqrt() + 1.0,
                    "{one_in} {turns} {turn}: {hits}"
                );
            }
        }
    }
}

/// Any JSON, with members that mean something among others.
fn any_json() -> impl Strategy<Value = serde_json::Value> {
    let key = prop_oneof![
        Just("usage".to_owned()),
        Just("prompt_tokens".to_owned()),
        Just("message".to_owned()),
        any::<String>(),
    ];
    let leaf = prop_oneof![
        (0..=TOKENS_MAX + 1).prop_map(|number| json!(number)),
        any::<String>().prop_map(|text| json!(text)),
        Just(json!(null)),
    ];
    leaf.prop_recursive(5, 40, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(|items| json!(items)),
            prop::collection::hash_map(key.clone(), inner, 0..5).prop_map(|map| json!(map)),
        ]
    })
}

/// What the same document says to a parser that builds a tree.
fn expected(document: &serde_json::Value) -> Option<u64> {
    let answers = match document {
        serde_json::Value::Array(answers) => answers.as_slice(),
        answer => std::slice::from_ref(answer),
    };
    let places = ["/usage/prompt_tokens", "/message/usage/prompt_tokens"];
    let found = answers
        .iter()
        .filter(|answer| answer.is_object())
        .flat_map(|answer| places.map(|place| answer.pointer(place)));
    found.flatten().filter_map(serde_json::Value::as_u64).max()
}

proptest! {
    #[test]
    fn agrees_with_a_tree_in_any_cut_and_frame(
        documents in prop::collection::vec(any_json(), 1..4),
        pretty in any::<bool>(),
        framing in 0..3_u8,
        size in 1..200_usize,
    ) {
        let text = |document: &serde_json::Value| match pretty && framing == 0 {
            true => serde_json::to_string_pretty(document).unwrap(),
            false => document.to_string(),
        };
        // A body of JSON begins with a container; other documents only come in events.
        let is_body = documents.iter().all(|document| document.is_object() || document.is_array());
        prop_assume!(framing == 2 || is_body);
        let mut body = String::new();
        for document in &documents {
            match framing {
                0 | 1 => body += &format!("{}\n", text(document)),
                _ => body += &format!("event: x\ndata: {}\n\n", text(document)),
            }
        }
        let pieces: Vec<&[u8]> = body.as_bytes().chunks(size).collect();
        let found = read(&pieces).prompt_tokens;
        let most = documents.iter().filter_map(expected).max();
        prop_assert_eq!(found, most.filter(|tokens| *tokens <= TOKENS_MAX));
    }

    #[test]
    fn any_bytes_in_any_cut_say_the_same(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        start in prop_oneof![Just("{\"usage\":{"), Just("data: {"), Just("["), Just("")],
        size in 1..50_usize,
    ) {
        let body = [start.as_bytes(), &bytes].concat();
        let pieces: Vec<&[u8]> = body.chunks(size).collect();
        prop_assert_eq!(read(&pieces), read(&[&body]));
    }
}
