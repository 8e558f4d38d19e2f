//! User objects: a resource of the program's that is destroyed when nobody refers to it any more,
//! neither the program nor a graph.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};

use crate::abi::{Answer, Out, entry_points};
use crate::driver::{State, driver};
use crate::error::CudaError;
use crate::host::{HostFn, HostFunction};
use crate::types::{CUgraph, CUuserObject};

/// All user objects of this process.
#[derive(Debug, Default)]
pub(crate) struct UserObjects {
    objects: BTreeMap<CUuserObject, UserObject>,
    /// References that graphs hold.
    of_graphs: BTreeMap<(CUgraph, CUuserObject), u32>,
}

#[derive(Debug)]
struct UserObject {
    references: u32,
    destroy: HostFunction,
}

impl State {
    fn user_object(&mut self, object: CUuserObject) -> Answer<&mut UserObject> {
        let object = self.user_objects.objects.get_mut(&object);
        object.ok_or(CudaError::InvalidValue)
    }

    fn retain_user_object(&mut self, object: CUuserObject, count: u32) -> Answer {
        let object = self.user_object(object)?;
        let references = object.references.checked_add(count);
        object.references = references.ok_or(CudaError::InvalidValue)?;
        Ok(())
    }

    /// Takes references away, and lets the object be destroyed with the last one.
    fn release_user_object(&mut self, handle: CUuserObject, count: u32) -> Answer {
        let object = self.user_object(handle)?;
        let references = object.references.checked_sub(count);
        object.references = references.ok_or(CudaError::InvalidValue)?;
        if object.references > 0 {
            return Ok(());
        }
        match self.user_objects.objects.remove(&handle) {
            Some(object) => self.call_soon(object.destroy),
            None => Ok(()),
        }
    }

    /// A copy of a graph refers to what the graph refers to.
    pub(crate) fn copy_user_objects(&mut self, from: CUgraph, to: CUgraph) -> Answer {
        let held = self.user_objects.of_graphs.iter();
        let held = held.filter(|((graph, _), _)| *graph == from);
        let held: Vec<(CUuserObject, u32)> =
            held.map(|((_, object), count)| (*object, *count)).collect();
        for (object, count) in held {
            self.retain_user_object(object, count)?;
            self.user_objects.of_graphs.insert((to, object), count);
        }
        Ok(())
    }

    /// A graph is gone, with its references.
    pub(crate) fn forget_user_objects(&mut self, graph: CUgraph) -> Answer {
        let held = self.user_objects.of_graphs.iter();
        let held = held.filter(|((of, _), _)| *of == graph);
        let held: Vec<(CUuserObject, u32)> =
            held.map(|((_, object), count)| (*object, *count)).collect();
        self.user_objects
            .of_graphs
            .retain(|(of, _), _| *of != graph);
        held.into_iter()
            .try_for_each(|(object, count)| self.release_user_object(object, count))
    }
}

entry_points! {
    "cuUserObjectCreate" 11030 fn cuUserObjectCreate(object: Out<CUuserObject>, data: *mut c_void, destroy: Option<HostFn>, references: c_uint, flags: c_uint) {
        const NO_DESTRUCTOR_SYNC: c_uint = 1;
        if flags != NO_DESTRUCTOR_SYNC || references == 0 || object.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let destroy = HostFunction::plain(destroy, data)?;
        let mut state = driver()?.state();
        let handle = CUuserObject(state.handle());
        state.user_objects.objects.insert(handle, UserObject { references, destroy });
        object.set(handle)
    }

    "cuUserObjectRetain" 11030 fn cuUserObjectRetain(object: CUuserObject, count: c_uint) {
        if count == 0 {
            return Err(CudaError::InvalidValue);
        }
        driver()?.state().retain_user_object(object, count)
    }
    "cuUserObjectRelease" 11030 fn cuUserObjectRelease(object: CUuserObject, count: c_uint) {
        if count == 0 {
            return Err(CudaError::InvalidValue);
        }
        driver()?.state().release_user_object(object, count)
    }

    "cuGraphRetainUserObject" 11030 fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint) {
        const MOVE: c_uint = 1;
        if count == 0 || flags & !MOVE != 0 {
            return Err(CudaError::InvalidValue);
        }
        let mut state = driver()?.state();
        state.require_graph(graph)?;
        // A moved reference is one that the caller had.
        match flags {
            0 => state.retain_user_object(object, count)?,
            _ if state.user_object(object)?.references < count => return Err(CudaError::InvalidValue),
            _ => {}
        }
        *state.user_objects.of_graphs.entry((graph, object)).or_default() += count;
        Ok(())
    }
    "cuGraphReleaseUserObject" 11030 fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint) {
        let mut state = driver()?.state();
        let held = state.user_objects.of_graphs.get_mut(&(graph, object));
        let held = held.filter(|held| **held >= count && count > 0).ok_or(CudaError::InvalidValue)?;
        *held -= count;
        if *held == 0 {
            state.user_objects.of_graphs.remove(&(graph, object));
        }
        state.release_user_object(object, count)
    }
}
