//! What the members of messages, content blocks and tool calls mean, for all families together:
//! their names do not collide, and bodies mix them (a chat completions body with Anthropic's
//! blocks in it is common).
//!
//! Not here: the members of a body (the family files).

use super::node::Node;

/// A message. Whatever is not named here is not surely rendered (ids, status, annotations).
pub(super) fn member(key: &[u8]) -> Node {
    match key {
        b"role" => Node::Role,
        b"type" => Node::Kind,
        b"name" => Node::Name,
        b"content" | b"parts" => Node::Content,
        b"tool_calls" => Node::Calls,
        b"images" => Node::MediaList,
        _ => block_member(key),
    }
}

/// A content block.
pub(super) fn block_member(key: &[u8]) -> Node {
    match key {
        b"text" | b"refusal" => Node::Text,
        b"thinking" | b"reasoning" | b"reasoning_content" | b"tool_plan" => Node::Reasoning,
        // Tool results: text, blocks, or (Responses) either as `output`.
        b"content" | b"parts" | b"output" | b"summary" => Node::Content,
        b"toolResult" => Node::Block,
        b"reasoningContent" => Node::ReasoningBlock,
        b"function_call" | b"functionCall" | b"functionResponse" | b"toolUse" => Node::Call,
        b"name" | b"input" | b"arguments" | b"json" | b"action" => Node::Value,
        b"image_url" | b"image" | b"source" | b"input_audio" | b"audio" | b"audio_url"
        | b"video" | b"video_url" | b"file" | b"document" | b"inlineData" | b"inline_data"
        | b"fileData" | b"file_data" | b"file_id" | b"file_url" => Node::Media,
        _ => Node::Skip,
    }
}

/// A block of reasoning, as Bedrock nests it. Its signature is not rendered.
pub(super) fn reasoning_member(key: &[u8]) -> Node {
    match key {
        b"reasoningText" => Node::ReasoningBlock,
        b"text" => Node::Reasoning,
        _ => Node::Skip,
    }
}

/// A tool call. Ids are left out: most templates do not render them.
pub(super) fn call_member(key: &[u8]) -> Node {
    match key {
        b"id" | b"index" | b"type" | b"call_id" | b"toolUseId" | b"cache_control" => Node::Skip,
        _ => Node::Value,
    }
}
