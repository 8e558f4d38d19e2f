//! Sets the linker flags of the real library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Linkers and `ldconfig` identify the library by its SONAME.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Calls within the library are not interposed by preloaded libraries.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
