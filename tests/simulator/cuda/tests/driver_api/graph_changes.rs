//! What nodes do and depend on: read, changed, and changed once more in what was made of the graph.

use std::ffi::c_void;

use crate::api::{Handle, INVALID_VALUE, Invoke, call};
use crate::graph_nodes::{ground, kernel, nothing};

const NONE: Handle = std::ptr::null_mut();

#[test]
fn event_nodes_have_their_event() {
    let ground = ground();
    let api = &ground.api;
    let events = [api.event(), api.event()];
    for what in ["Record", "Wait"] {
        let (mut node, mut read) = (NONE, NONE);
        let name = |verb: &str| format!("cuGraphEvent{what}Node{verb}Event");
        let add = api.symbol(&format!("cuGraphAddEvent{what}Node"));
        let code: u32 = Invoke::invoke(add, (&raw mut node, ground.graph, NONE, 0usize, events[0]));
        assert_eq!(code, 0, "{what}");
        let get = api.symbol(&name("Get"));
        let set = api.symbol(&name("Set"));
        let on_exec = api.symbol(&format!("cuGraphExecEvent{what}NodeSetEvent"));
        let read_event = |read: &mut Handle| {
            let code: u32 = Invoke::invoke(get, (node, std::ptr::from_mut(read)));
            assert_eq!(code, 0, "{what}");
        };
        read_event(&mut read);
        assert_eq!(read, events[0], "{what}");
        let code: u32 = Invoke::invoke(set, (node, events[1]));
        assert_eq!(code, 0, "{what}");
        read_event(&mut read);
        assert_eq!(read, events[1], "{what}");
        let code: u32 = Invoke::invoke(on_exec, (ground.instantiate(), node, events[0]));
        assert_eq!(code, 0, "{what}");
    }
}

#[test]
fn host_and_child_nodes_are_read_and_changed() {
    static CALLED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    unsafe extern "C" fn note(data: *mut c_void) {
        CALLED.store(data.addr(), std::sync::atomic::Ordering::SeqCst);
    }
    type Host = (unsafe extern "C" fn(*mut c_void), usize);
    let ground = ground();
    let api = &ground.api;
    let mut node = NONE;
    let first: Host = (note, 1);
    let code = call!(
        api,
        "cuGraphAddHostNode",
        &raw mut node,
        ground.graph,
        NONE,
        0usize,
        &raw const first
    );
    assert_eq!(code, 0);
    let mut read: Host = (nothing, 0);
    assert_eq!(
        call!(api, "cuGraphHostNodeGetParams", node, &raw mut read),
        0
    );
    assert_eq!(read.1, 1);
    let exec = ground.instantiate();
    for (change, expected) in [(None, 1), (Some(2), 2)] {
        if let Some(data) = change {
            let changed: Host = (note, data);
            assert_eq!(
                call!(
                    api,
                    "cuGraphExecHostNodeSetParams",
                    exec,
                    node,
                    &raw const changed
                ),
                0
            );
        }
        ground.run(exec);
        assert_eq!(CALLED.load(std::sync::atomic::Ordering::SeqCst), expected);
    }
    let third: Host = (note, 3);
    assert_eq!(
        call!(api, "cuGraphHostNodeSetParams", node, &raw const third),
        0
    );
    assert_eq!(
        call!(api, "cuGraphHostNodeGetParams", node, &raw mut read),
        0
    );
    assert_eq!(read.1, 3);

    // A child graph is a copy of what it was made of.
    let (mut child, mut place, mut inner) = (NONE, NONE, NONE);
    assert_eq!(call!(api, "cuGraphClone", &raw mut child, ground.graph), 0);
    let code = call!(
        api,
        "cuGraphAddChildGraphNode",
        &raw mut place,
        ground.graph,
        NONE,
        0usize,
        child
    );
    assert_eq!(code, 0);
    assert_eq!(
        call!(api, "cuGraphChildGraphNodeGetGraph", place, &raw mut inner),
        0
    );
    assert!(inner != child && !inner.is_null());
    let exec = ground.instantiate();
    assert_eq!(
        call!(
            api,
            "cuGraphExecChildGraphNodeSetParams",
            exec,
            place,
            child
        ),
        0
    );
    ground.run(exec);
}

#[test]
fn kernel_nodes_are_read_and_changed_in_both_versions() {
    let ground = ground();
    let api = &ground.api;
    let mut params = kernel(api);
    for version in ["", "_v2"] {
        let name = |verb: &str| api.symbol(&format!("cuGraph{verb}{version}"));
        let mut node = NONE;
        params.shape[0] = 1;
        let code: u32 = Invoke::invoke(
            name("AddKernelNode"),
            (&raw mut node, ground.graph, NONE, 0usize, &raw const params),
        );
        assert_eq!(code, 0, "{version}");
        params.shape[0] = 7;
        let code: u32 = Invoke::invoke(name("KernelNodeSetParams"), (node, &raw const params));
        assert_eq!(code, 0, "{version}");
        params.shape[0] = 0;
        let code: u32 = Invoke::invoke(name("KernelNodeGetParams"), (node, &raw mut params));
        assert_eq!((code, params.shape[0]), (0, 7), "{version}");
        let mut value = [1u64; 8];
        assert_eq!(
            call!(
                api,
                "cuGraphKernelNodeSetAttribute",
                node,
                2u32,
                value.as_ptr()
            ),
            0
        );
        assert_eq!(
            call!(
                api,
                "cuGraphKernelNodeGetAttribute",
                node,
                2u32,
                value.as_mut_ptr()
            ),
            0
        );
        assert_eq!(call!(api, "cuGraphKernelNodeCopyAttributes", node, node), 0);
    }
}

#[test]
fn dependencies_are_added_listed_and_removed_in_both_versions() {
    let ground = ground();
    let api = &ground.api;
    let node = || {
        let mut node = NONE;
        assert_eq!(
            call!(
                api,
                "cuGraphAddEmptyNode",
                &raw mut node,
                ground.graph,
                NONE,
                0usize
            ),
            0
        );
        node
    };
    let (first, second) = (node(), node());
    for version in ["", "_v2"] {
        let change = |verb: &str| {
            let symbol = api.symbol(&format!("cuGraph{verb}Dependencies{version}"));
            let (from, to) = (&raw const first, &raw const second);
            let code: u32 = match version {
                "" => Invoke::invoke(symbol, (ground.graph, from, to, 1usize)),
                _ => Invoke::invoke(symbol, (ground.graph, from, to, NONE, 1usize)),
            };
            assert_eq!(code, 0, "{verb} {version}");
        };
        let list = |what: &str, of: Handle| {
            let symbol = api.symbol(&format!("cuGraphNodeGet{what}{version}"));
            let (mut found, mut count) = ([NONE; 4], 4usize);
            let code: u32 = match version {
                "" => Invoke::invoke(symbol, (of, found.as_mut_ptr(), &raw mut count)),
                _ => Invoke::invoke(symbol, (of, found.as_mut_ptr(), NONE, &raw mut count)),
            };
            assert_eq!(code, 0, "{what} {version}");
            found[..count].to_vec()
        };
        change("Add");
        assert_eq!(list("Dependencies", second), [first]);
        assert_eq!(list("DependentNodes", first), [second]);
        let (mut roots, mut count) = ([NONE; 4], 4usize);
        let code = call!(
            api,
            "cuGraphGetRootNodes",
            ground.graph,
            roots.as_mut_ptr(),
            &raw mut count
        );
        assert_eq!((code, &roots[..count]), (0, &[first][..]));
        change("Remove");
        assert_eq!(list("Dependencies", second), []);
    }
    let (mut clone, mut twin) = (NONE, NONE);
    assert_eq!(call!(api, "cuGraphClone", &raw mut clone, ground.graph), 0);
    assert_eq!(
        call!(api, "cuGraphNodeFindInClone", &raw mut twin, first, clone),
        0
    );
    assert_eq!(ground.kind(twin), 5);
    let dot = ground.machine.root().join("graph.dot");
    let path = std::ffi::CString::new(dot.to_str().unwrap()).unwrap();
    assert_eq!(
        call!(
            api,
            "cuGraphDebugDotPrint",
            ground.graph,
            path.as_ptr(),
            0u32
        ),
        0
    );
    assert_eq!(
        std::fs::read_to_string(dot)
            .unwrap()
            .matches("type 5")
            .count(),
        2
    );
    assert_eq!(call!(api, "cuGraphDestroyNode", second), 0);
    let mut kind = 0;
    assert_eq!(
        call!(api, "cuGraphNodeGetType", second, &raw mut kind),
        INVALID_VALUE
    );
}
