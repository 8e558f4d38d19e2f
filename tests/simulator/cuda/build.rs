//! Links the library as the real one is.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Linkers and `ldconfig` go by it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Addresses of exported functions are our own, whatever is preloaded under the same names.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
