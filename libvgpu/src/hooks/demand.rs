//! Hooks whose only purpose is the demand of a suspended share, see [`crate::process::show_demand`]: they pass all calls.

use core::ffi::c_int;

/// Bodies of hooks whose only purpose is the demand, by their number of arguments.
macro_rules! passing {
    ($($name:ident($($argument:ident: $type:ident),*);)*) => {
        $(
            pub(crate) unsafe fn $name<$($type),*>(
                original: unsafe extern "C" fn($($type),*) -> c_int,
                $($argument: $type),*
            ) -> c_int {
                // SAFETY: the caller's arguments.
                unsafe { original($($argument),*) }
            }
        )*
    };
}

passing! {
    none();
    one(a: A);
    two(a: A, b: B);
    three(a: A, b: B, c: C);
    four(a: A, b: B, c: C, d: D);
    five(a: A, b: B, c: C, d: D, e: E);
}
