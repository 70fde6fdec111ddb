//! Bodies of a server's own (SageMaker `/invocations`, unknown paths): JSON pointers from the
//! config say where the prompt lies.

use super::Family;

pub(super) const FAMILY: Family = Family {
    api: "native",
    paths: &["invocations"],
    native: true,
    any_shape: true,
    ..Family::DEFAULT
};
