//! The marks in the bodies of tests/payloads, for every test that reads one. Not here: the cases.

/// A body with its marks replaced: `<<300*text>>` (that often), `<<hex ff fe>>`, `<<base64 300>>`
/// (that many letters).
pub fn expand(body: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = body;
    while let Some((before, mark)) = rest.split_once("<<") {
        bytes.extend_from_slice(before.as_bytes());
        let (mark, after) = mark.split_once(">>").unwrap();
        rest = after;
        if let Some(hex) = mark.strip_prefix("hex ") {
            let byte = |hex| u8::from_str_radix(hex, 16).unwrap();
            bytes.extend(hex.split(' ').map(byte));
        } else if let Some(count) = mark.strip_prefix("base64 ") {
            let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
            let letter = |at: usize| letters[(at * at + at / 7) % 64];
            bytes.extend((0..count.parse().unwrap()).map(letter));
        } else {
            let (count, text) = mark.split_once('*').unwrap();
            bytes.extend(text.repeat(count.parse().unwrap()).into_bytes());
        }
    }
    bytes.extend_from_slice(rest.as_bytes());
    bytes
}
